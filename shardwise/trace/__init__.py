"""Reads profiles of PyTorch programs and explains where the time went. Imports no torch.

`reading/` makes columns of files, `spans/` says what ran when, `comms/` what ranks sent each other. `attribution.py` and `rank.py`
gather one rank; the files beside them answer one question each; `explain.py` asks them all, `advice.py` says what to change.
"""
