"""What a run needs, before it runs. Without torch.

Rooms from the ground up, each importing only those below it: `cost` (operations of any framework), `trainer` (what this trainer
does, to the byte), `time` (the step and the job), `plan.py` (one run's plan), and on it `search` (the best layouts), `serving` and
`published` (measured rows, predicted).
"""

import sys

from shardwise import VerbFolder

sys.modules[__name__] = VerbFolder(globals())
