"""The cost of a model's operations on a chip, for any framework: parameters, FLOPs, bytes and seconds of one microbatch on a rank.

`job.py` is what all formulas read, `frameworks.py` what training programs do differently. `ops.py` and `operations.py` list the
ops of the network; `passes.py` adds them up to seconds, `memory.py` to bytes. `constants.py` holds what was
fitted to published measurements. Sizes may be arrays, one entry a layout.
"""
