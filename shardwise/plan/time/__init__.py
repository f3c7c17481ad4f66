"""From the cost of operations to the time of a step, its timeline, and the time and money of a whole job.

`step.py` is the step of one layout or of many; `waves.py` plays one schedule under many costs at once. `timeline.py` is the step
drawn out, `goodput.py` the weeks of a job with its failures and checkpoints.
"""
