"""The cost of a model's operations on a chip, for any framework: parameters, FLOPs, bytes and seconds of one microbatch on a rank.

`job.py` is the input of all formulas, `frameworks.py` lists what training programs do differently. `ops.py` and `operations.py`
list the ops of the network; `passes.py` adds them up to seconds, `memory.py` to bytes. `constants.py` holds the constants that were
fitted to published measurements. Sizes may be arrays, one entry a layout.
"""
