"""Helpers shared by verbs: argument types, terminal characters and progress, versions, and the imports of the fork server."""
