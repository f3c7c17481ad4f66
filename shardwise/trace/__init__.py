"""Reads profiles of PyTorch programs and explains where the time went. Imports no torch.

`reading/` parses files into columns, `spans/` classifies device activity and selects steps, `comms/` describes and matches
collectives. `attribution.py` and `rank.py` collect what is known of one rank. Each other file answers one question; `explain.py`
asks them all, `advice.py` says what to change.
"""

import sys

from shardwise import VerbFolder

sys.modules[__name__] = VerbFolder(globals())
