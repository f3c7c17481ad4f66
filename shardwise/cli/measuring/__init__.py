"""Verbs that measure: this machine, some steps of a run, and a run beside its plan."""
