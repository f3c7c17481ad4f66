"""The loop, the step, objectives, optimizers, metrics, and how the ranks of a run are started."""

import sys

from shardwise import VerbFolder

sys.modules[__name__] = VerbFolder(globals())
