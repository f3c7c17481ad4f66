"""Ranks are linked over the network where they met, of IPv4 or IPv6."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist
from parallel_pool import RankPool

from shardwise.run import LayoutConfig
from shardwise.run.ranks.served import ServingRank
from shardwise.serve.links import Links


def heard_on(rank: int, meet: str) -> list[str]:
    """What a rank is told: two replicas of two ranks each."""
    links = Links(ServingRank(LayoutConfig(replicate=2, tensor=2), rank), meet)
    for connection in links.followers:
        connection.send(f"from leader {rank}")
    for connection in links.replicas:
        connection.send("from rank 0")
    heard = [connection.recv() for connection in (links.requests, links.leader) if connection is not None]
    if rank == 0:
        links.close()
    dist.barrier()  # until then, no rank may end
    return heard


@pytest.mark.parametrize("meet", ["127.0.0.1", "::1", "localhost"])
def test_ranks_hear_each_other(ranks: RankPool, meet: str) -> None:
    if meet == "::1":
        try:
            with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
                probe.connect((meet, 1))
        except OSError:
            pytest.skip("this machine has no IPv6")
    assert ranks.run(4, heard_on, meet) == [[], ["from leader 0"], ["from rank 0"], ["from leader 2"]]
