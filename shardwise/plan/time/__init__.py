"""From the cost of operations to the time of a step, its timeline, and the time and money of a whole job.

`step.py` times the step of one layout or of many; `waves.py` plays one schedule under many costs at once. `timeline.py` lays out
the step as spans; `goodput.py` covers the weeks of a job with its failures and checkpoints.
"""
