"""The training loop and the training step. Subfolders hold batches, objectives, optimizers, progress reports, and how the ranks of
a run are started and kept alive."""

import sys

from shardwise import VerbFolder

sys.modules[__name__] = VerbFolder(globals())
