"""Helpers shared by verbs: argument types, terminal characters and progress, versions."""
