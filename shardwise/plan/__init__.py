"""Predicts what a run needs before it runs: memory, time, traffic and money. Does not import torch.

The parts from the bottom up; each imports only those before it: `cost` (the operations, for any framework), `trainer` (what this
project's trainer does, to the byte), `time` (the step and the whole job), `plan.py` (the plan of one run). On top of these are
`search` (the best layouts), `serving`, and `published` (predictions for published measurements).
"""

import sys

from shardwise import VerbFolder

sys.modules[__name__] = VerbFolder(globals())
