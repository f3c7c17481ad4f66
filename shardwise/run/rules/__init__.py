"""What must fit together in a run: one file for each matter, called by `check.py`."""
