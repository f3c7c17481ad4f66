"""A profiler for any PyTorch module: FLOPs, parameters, saved activations and time of each of its submodules.

`formulas.py` has the FLOPs of operators and `attention.py` those of attention, by pairs; `watch.py` follows a module while it runs,
`clock.py` divides time among submodules, and `tree.py` adds up submodules. Nothing here knows this project's own models.
"""
