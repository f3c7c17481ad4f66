"""Verbs that measure: this machine, a few steps of a run, and a run against its plan."""
