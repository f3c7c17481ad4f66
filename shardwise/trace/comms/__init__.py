"""Collective events: found on device or host, described, matched across ranks, and split into exposed and overlapped time."""
