"""The sections of a run, each with its keys declared once."""
