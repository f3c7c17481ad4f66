"""Verbs that answer before anything runs: what a run needs, which layout or model is best, and how accurate plans are."""
