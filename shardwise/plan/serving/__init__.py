"""What a model costs to serve, by the same kernel curves as training.

`cost.py` has the cost of a pass. A run is planned by playing its load (`play.py`) with the engine's own scheduler, each step taking
what was measured of such steps (`step_time.py`, `curves.py`); `pool.py` has the memory, `plan.py` the answer. What others published
of their engines is predicted by closed forms, since their schedulers are not ours to play: `engines.py`, `loads.py`,
`inference.py`.
"""
