"""Collective events: found on device or host, described, matched over ranks, and how much of them compute overlaps."""
