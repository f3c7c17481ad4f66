"""Counts the FLOPs, memory and messages of a rank while it runs."""
