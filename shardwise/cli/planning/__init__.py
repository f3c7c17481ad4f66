"""Verbs that answer before anything runs: what a run needs, which layout or model is best, how far off the plan is."""
