"""The first messages between ranks of a pipeline. NCCL makes a communicator for two ranks of a group at their first message, and
blocks the host of whichever rank comes first until the other makes the same call. In the order of a schedule two ranks may then
wait for each other. So all pairs are opened beforehand, in one order.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist

from shardwise.parallel.mesh import Mesh
from shardwise.parallel.p2p import irecv, isend
from shardwise.schedules import Schedule


def group_of(mesh: Mesh, sender: int, receiver: int) -> dist.ProcessGroup | None:
    """The group for messages between two ranks of a pipeline. Each direction has a communicator of its own, so that a send never
    queues behind a receive that waits for it."""
    return mesh.group("pipeline_back" if sender > receiver else "pipeline")


def opening_order(schedule: Schedule) -> list[tuple[int, int]]:
    """All pairs (sender, receiver) of a pipeline that any number of microbatches may need, in the order in which they are opened.
    Of the pairs that are not open yet, both ranks of the first one come to it next: so nothing waits for ever. Those of even ranks
    come first, so that half of all neighbours are opened at a time, not one after the other."""
    both = list(pairwise(schedule.placement))
    if schedule.partners:
        ranks = range(len(schedule.ranks))
        both += zip(ranks, reversed(ranks), strict=True)
    pairs = {pair for one, other in both if one != other for pair in ((one, other), (other, one))}
    return sorted(pairs, key=lambda pair: (min(pair) % 2, pair))


def open_pairs(mesh: Mesh, schedule: Schedule, device: torch.device) -> None:
    """Send one element between each two ranks of this pipeline that will exchange messages, so that their communicators exist."""
    ranks, me = mesh.pipeline_ranks(), mesh.index("pipeline")
    for sender, receiver in opening_order(schedule):
        if me in (sender, receiver):
            x, group = torch.zeros(1, device=device), group_of(mesh, sender, receiver)
            (isend(x, ranks[receiver], group) if me == sender else irecv(x, ranks[sender], group)).wait()
