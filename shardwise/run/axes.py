"""The six words for the ways a run is split over devices. Config keys, mesh dimensions, process groups, traffic tables,
trace labels and report colours all use them, so that a byte on the wire can always be blamed on an axis."""

from __future__ import annotations

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")

# `expert` adds no ranks: it regroups those of shard x context.
RANK_AXES = ("replicate", "shard", "context", "tensor", "pipeline")
