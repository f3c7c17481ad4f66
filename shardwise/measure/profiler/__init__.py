"""A profiler for any PyTorch module: FLOPs, parameters, saved activations and time of each of its submodules.

`formulas.py` has the FLOPs of operators; `watch.py` follows a module while it runs and divides time among its submodules; `tree.py`
adds up submodules. Nothing here knows this project's own models.
"""
