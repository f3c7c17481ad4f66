"""The six words for the ways a run is split over devices. Config keys, mesh dimensions, process groups, traffic tables,
trace labels and report colours all use them, so that every byte on the wire can be attributed to an axis. Also the properties of
pipeline schedules that a run must know by name, so that it need not import the schedules."""

from __future__ import annotations

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")

# `expert` adds no ranks: it regroups those of shard x context.
RANK_AXES = ("replicate", "shard", "context", "tensor", "pipeline")

LOOPED = ("interleaved", "breadth-first")
"""Pipeline schedules with any number of stages on each rank."""
HOLDS_ALL = ("gpipe", "breadth-first")
"""Schedules that hold all microbatches of a step at once."""
V_SHAPED = ("zb-v", "dualpipe-v", "dualpipe")
"""Schedules with two stages on each rank: the first rank holds the first stage and the last."""
BIDIRECTIONAL = ("dualpipe",)
"""Schedules whose microbatches enter at both ends: every stage is on two ranks, once for each direction."""
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
"""Schedules without a flush: passes of a step use weights from before the last updates."""
SPLIT_BACKWARD = ("zb-h1", "zb-2p", "zb-v", "dualpipe-v", "dualpipe")
"""Schedules that split the backward pass into one for inputs and one for weights."""
