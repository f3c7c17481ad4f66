"""Verbs that use weights: serve them, put load on a server, continue text, evaluate."""
