"""The cost of serving a model, by the same kernel curves as training.

`cost.py` has the cost of a pass. A run is planned by simulating its load (`simulate.py`) with the engine's own scheduler, each step
with the time measured for such steps (`step_time.py`, `curves.py`); `pool.py` has the memory, `plan.py` the result. Published
figures of other engines are predicted by closed forms, since we cannot run their schedulers: `engines.py`, `loads.py`,
`inference.py`.
"""
