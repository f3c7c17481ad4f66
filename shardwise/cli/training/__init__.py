"""Verbs around a run that trains: start it, submit it as a job, watch it, list what it saved."""
