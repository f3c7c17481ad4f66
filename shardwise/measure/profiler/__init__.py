"""A profiler for any PyTorch module: operations, parameters, saved activations and time of each of its submodules.

`formulas.py` says what an operator costs and `attention.py` which pairs attend, `watch.py` follows a module while it runs,
`clock.py` divides the time among what ran, and `tree.py` adds up submodules. Nothing here knows this project's own models.
"""
