"""Helpers shared by verbs: argument types and files, what a terminal shows, the ranks of a command, versions."""
