"""The loop, the step, and in rooms what they get, do and say, and how the ranks of a run are started and kept alive."""

import sys

from shardwise import VerbFolder

sys.modules[__name__] = VerbFolder(globals())
