"""Consistency rules of a run: one file for each topic, called by `check.py`."""
