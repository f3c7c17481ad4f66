"""The counter of messages sees every call of every group, and the causal work of ring attention is even. That the messages of a
layout are the planner's is in test_layouts.py."""

from __future__ import annotations

from fractions import Fraction
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from parallel_pool import RankPool
from torch import Tensor

from shardwise.ledger import Difference
from shardwise.measure.counts.traffic import Traffic, TrafficCounter
from shardwise.measure.verify import TOLERANCE, random_batch, verify_rank
from shardwise.parallel import context, gradients
from shardwise.parallel.blockwise import BlockMask, Bounds, attend_block, attend_block_backward
from shardwise.parallel.collectives import all_gather_single, reduce_scatter_single
from shardwise.plan.trainer import ends
from shardwise.run import Run
from shardwise.train.step import TrainState


def known_calls(rank: int) -> Traffic:
    everyone, some = dist.group.WORLD, dist.new_group([0, 1])
    assert everyone is not None
    names = {everyone.group_name: "three"} | ({some.group_name: "two"} if rank < 2 else {})
    mine, all_of_it = torch.ones(5), torch.empty(15)
    with TrafficCounter(names) as counter:
        dist.all_reduce(mine)
        all_gather_single(all_of_it, mine)
        dist.all_gather([torch.empty(5) for _ in range(3)], mine)
        reduce_scatter_single(mine, all_of_it)
        dist.all_to_all_single(all_of_it, all_of_it.clone())
        if rank < 2:
            # The first rank keeps three rows and sends two, the second sends one and keeps four.
            sent = [[3, 2], [1, 4]]
            out = torch.empty(sum(row[rank] for row in sent))
            dist.all_to_all_single(out, mine, [row[rank] for row in sent], sent[rank], group=some)
            peer = 1 - rank
            operations = [dist.P2POp(dist.isend, mine, peer, some), dist.P2POp(dist.irecv, torch.empty(5), peer, some)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        dist.broadcast(mine, 2)
        with pytest.raises(NotImplementedError):
            dist.reduce(mine, 0)
    return counter.traffic


def test_counter_sees_every_call(ranks: RankPool) -> None:
    both = {("three", "all_reduce"): Fraction(2 * 2 * 20, 3), ("three", "all_gather"): 2 * 2 * 20,
            ("three", "reduce_scatter"): 2 * 20, ("three", "all_to_all"): 2 * 20}  # fmt: skip
    first = both | {("two", "all_to_all"): 2 * 4, ("two", "send"): 20}
    second = both | {("two", "all_to_all"): 1 * 4, ("two", "send"): 20}
    third = both | {("three", "broadcast"): 20}  # counted where it is sent
    assert ranks.run(3, known_calls) == [first, second, third]


def ring_work(rank: int, length: int) -> tuple[int, int]:
    """Of a causal attention over the ring, forward and backward, the (query, key) pairs a rank computes, and those seen."""
    computed = seen = 0

    def count(q: Tensor, k: Tensor, mask: BlockMask) -> None:
        nonlocal computed, seen
        pairs = q.shape[-2] * k.shape[-2]
        computed += pairs
        seen += pairs if mask is None else q.shape[-2] * (q.shape[-2] + 1) // 2
        assert not isinstance(mask, Bounds), "a causal ring needs no masks"

    def counted_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: BlockMask) -> Any:
        count(q, k, mask)
        return attend_block(q, k, v, scale, mask)

    def counted_backward(grad: Tensor, out: Tensor, delta: Tensor, q: Tensor, k: Tensor, *rest: Any) -> Any:
        count(q, k, rest[-1])
        return attend_block_backward(grad, out, delta, q, k, *rest)

    group = dist.group.WORLD
    assert group is not None
    part = length // group.size()
    q, k, v = (torch.ones(1, part, 1, 2, requires_grad=True) for _ in "qkv")
    ring = context.RingAttention(1.0, group)
    ring.kernels = counted_forward, counted_backward
    ring(q, k, v, context.ContextMask(None, 0)).sum().backward()
    return computed, seen


@pytest.mark.parametrize("size", [2, 4])
def test_causal_work_of_the_ring_is_balanced(ranks: RankPool, size: int) -> None:
    length = 16 * size
    work = ranks.run(size, ring_work, length)
    for kind in zip(*work, strict=True):
        assert max(kind) - min(kind) <= 0.02 * min(kind)
    # Forward and backward, every pair that causal attention sees, once.
    assert sum(seen for _, seen in work) == 2 * length * (length + 1) // 2
    # Chunks that lie in the future are not computed, but for one in the causal block of a rank's own two: of the 4c pairs of chunks
    # 2c + 2 are.
    assert sum(computed for computed, _ in work) == 2 * size * (2 * size + 2) * (length // (2 * size)) ** 2


def with_large_gradients_alone(
    rank: int, run: Run, most: int
) -> tuple[list[Difference], dict[str, float], list[Tensor]]:
    """What differs from the plan, the planned messages and the weights, where gradients of more than `most` values go alone."""
    with mock.patch.object(gradients, "JOINED", most), mock.patch.object(ends, "JOINED", most):
        verdict = verify_rank(run, steps=1)
        state = TrainState(run)
        state.train_step(random_batch(run, 0)).read()
    weights = [held.parameter.detach().clone() for held in state.parallel.parameters]
    return verdict.beyond(TOLERANCE), dict(verdict.planned.traffic.messages["tensor"]), weights


def test_large_gradients_are_summed_alone_and_planned_so(ranks: RankPool) -> None:
    run = cases.make_run("mixture", dict(tensor=2))
    joined = ranks.run(2, with_large_gradients_alone, run, 10**9)
    alone = ranks.run(2, with_large_gradients_alone, run, 200)
    for (wrong, few, weights), (wrong_alone, more, same) in zip(joined, alone, strict=True):
        assert not wrong, wrong
        assert not wrong_alone, wrong_alone
        assert more["all_reduce"] > few["all_reduce"] + run.model.layers
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
