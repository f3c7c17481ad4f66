"""Verbs that use weights: serve them, load-test a server, continue text, evaluate."""
