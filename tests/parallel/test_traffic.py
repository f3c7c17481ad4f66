"""Communication is what the planner says: the bytes that each rank sends in a step, by axis and operation, and the messages
they travel in, equal those of `shardwise.plan.trainer.traffic`, from model and layout alone. Where the bytes depend
on the routing of tokens, they are counted from the experts that the routers chose.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from parallel_pool import RankPool
from torch import Tensor

from shardwise.measure.traffic import Traffic, TrafficCounter
from shardwise.model.moe import Router
from shardwise.model.transformer import Block
from shardwise.parallel import context
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.traffic import by_group
from shardwise.run import Run
from shardwise.train.step import TrainState

Choices = dict[int, list[Tensor]]  # what the router of each layer chose, call by call


def counted_step(rank: int, run: Run, warm_up: int) -> tuple[Traffic, Traffic, Choices]:
    """What a rank sends in one step, after some others: bytes and messages; and what its routers chose in it."""
    train_state = TrainState(run)
    cases.steps(train_state, 0, warm_up, documents=False)
    choices: Choices = {}

    def record_in(layer: int) -> Any:
        def record(module: Router, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
            weights, chosen, _ = out
            if module.counting:  # not a pass that is repeated
                # A choice beyond an expert's capacity has no weight and is not sent.
                choices.setdefault(layer, []).append(chosen[weights != 0])

        return record

    for model in train_state.parallel.models:
        for layer, block in model.layers.items():
            assert isinstance(block, Block)
            for router in (m for m in block.modules() if isinstance(m, Router)):
                router.register_forward_hook(record_in(int(layer)))
    with TrafficCounter(train_state.mesh.axes_by_group()) as counter:
        cases.steps(train_state, warm_up, warm_up + 1, documents=False)
    return counter.traffic, counter.messages, choices


def moved_rows(place: PlannedRank, choices: list[Choices]) -> dict[int, int]:
    """Rows that a rank sends to other expert ranks in each layer, forward: its own there, and theirs back."""
    m, lay = place.run.model, place.run.layout
    moved: dict[int, int] = {}
    mine = place.index("expert")
    first = place.rank - mine * lay.tensor - place.index("tensor")  # of the ranks that the experts are dealt out over
    for layer in choices[place.rank]:
        for expert in range(lay.expert):
            base = first + expert * lay.tensor
            senders = range(base, base + lay.tensor) if lay.expert_tensor else [base + place.index("tensor")]
            owners = torch.cat([c.flatten() for s in senders for c in choices[s][layer]]) // (m.experts // lay.expert)
            away = owners != mine if expert == mine else owners == mine
            moved[layer] = moved.get(layer, 0) + int(away.sum())
    return moved


def expected_traffic(place: PlannedRank, choices: list[Choices]) -> tuple[Traffic, Traffic]:
    """What the planner says a rank sends in a step."""
    sent = by_group(place.run, place.rank, moved_rows(place, choices))
    total = Counter({key: each.bytes for key, each in sent.items() if each.bytes})
    return total, Counter({key: each.messages for key, each in sent.items() if each.bytes})


def check(ranks: RankPool, run: Run, warm_up: int = 0) -> None:
    """Count a step of several microbatches on every rank, and hold it against the plan."""
    assert run.accumulation > 1
    results = ranks.run(run.layout.world, counted_step, run, warm_up)
    choices = [chosen for _, _, chosen in results]
    for rank, (counted, messages, _) in enumerate(results):
        assert (counted, messages) == expected_traffic(PlannedRank(run, rank), choices), f"rank {rank}"


@pytest.mark.parametrize("copies", [2, 4])
def test_replicate(ranks: RankPool, copies: int) -> None:
    # In its second step DistributedDataParallel agrees once on new buckets.
    check(ranks, cases.make_run("dense", dict(replicate=copies), microbatch=1), warm_up=2)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_shard(ranks: RankPool, size: int, zero: int) -> None:
    check(ranks, cases.make_run("dense", dict(shard=size, zero=zero), microbatch=1))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_copies_of_shards(ranks: RankPool, zero: int) -> None:
    check(ranks, cases.make_run("dense", dict(replicate=2, shard=2, zero=zero), microbatch=1))


@pytest.mark.parametrize("size", [2, 4])
def test_tensor(ranks: RankPool, size: int) -> None:
    """Four ranks are more than the two key/value heads."""
    check(ranks, cases.make_run("dense", dict(tensor=size), global_batch=4))


def test_overlapped_tensor_sends_the_same(ranks: RankPool) -> None:
    check(ranks, cases.make_run("dense", dict(tensor=2, async_tensor=True), global_batch=4))


def test_recomputed_layers_communicate_again(ranks: RankPool) -> None:
    check(ranks, cases.make_run("dense", dict(tensor=2, recompute="full"), global_batch=4))


@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
@pytest.mark.parametrize("size", [2, 4])
def test_context(ranks: RankPool, size: int, method: str) -> None:
    """Four ranks are more than the two key/value heads, which ulysses then repeats."""
    check(ranks, cases.make_run("dense", dict(context=size, context_method=method), global_batch=4))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("size", [2, 4])
def test_pipeline(ranks: RankPool, size: int, schedule: str) -> None:
    run = cases.make_run("dense", dict(pipeline=size, schedule=schedule, chunks=1))
    # Two stages on each of four ranks need more layers than the model has.
    layout = replace(run.layout, chunks=2) if schedule == "interleaved" else run.layout
    check(ranks, replace(run, model=replace(run.model, layers=8), layout=layout))


def test_tied_ends_of_a_pipeline(ranks: RankPool) -> None:
    check(ranks, cases.make_run("tied", dict(pipeline=2)))


def test_experts(ranks: RankPool) -> None:
    check(ranks, cases.make_run("mixture", dict(shard=2, expert=2)))


def test_experts_on_more_ranks_than_they_are_dealt_over(ranks: RankPool) -> None:
    """Each expert is sharded over two ranks."""
    check(ranks, cases.make_run("mixture", dict(shard=4, expert=2), microbatch=1))


@pytest.mark.parametrize("model", ["mixture", "capacity"])
def test_experts_over_context(ranks: RankPool, model: str) -> None:
    check(ranks, cases.make_run(model, dict(context=2, expert=2), global_batch=4))


@pytest.mark.parametrize("expert_tensor", [False, True])
def test_experts_and_tensor(ranks: RankPool, expert_tensor: bool) -> None:
    check(ranks, cases.make_run("mixture", dict(shard=2, expert=2, tensor=2, expert_tensor=expert_tensor)))


COMBINATIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", dict(tensor=2, pipeline=2, shard=2), {}),
    ("window", dict(context=4, shard=2), {}),
    ("mixture", dict(context=2, tensor=2, expert=2, shard=2), {}),
    ("mixture", dict(context=2, tensor=2, expert=4, shard=2, expert_tensor=True), {}),
    *[("mixture", dict(replicate=2, shard=2, pipeline=2, expert=2, zero=zero), {}) for zero in (1, 2, 3)],
    # A stage between the ends that is done with its microbatches before others come fetches a layer in vain.
    *[
        ("dense", dict(pipeline=2, shard=2, schedule="interleaved", zero=zero), dict(layers=8, microbatch=1))
        for zero in (1, 3)
    ],
    ("dense", dict(pipeline=2, shard=2, schedule="zb-v", zero=2), {}),
    ("mixture", dict(pipeline=2, shard=2, expert=2, schedule="zb-h1"), {}),
    ("mixture", dict(pipeline=2, shard=4, expert=2, schedule="dualpipe-v", zero=1, recompute="full"), {}),
    ("dense", dict(context=2, tensor=2, recompute="full"), {}),
    *[
        ("dense", dict(context=2, tensor=2, recompute="attention", context_method=method), {})
        for method in ("ring", "ulysses", "gather")
    ],
    ("dense", dict(context=2, tensor=2, recompute="full", context_method="ulysses", recompute_every=3), {}),
    ("mixture", dict(context=2, tensor=2, expert=2, recompute="full"), {}),
    ("mixture", dict(shard=2, tensor=2, expert=2, expert_tensor=True, recompute="full"), {}),
    ("softmax", dict(shard=2, tensor=2, expert=2, expert_tensor=True, recompute="full", recompute_every=2), {}),
    (
        "capacity",
        dict(shard=2, tensor=2, expert=2, recompute="operations", recompute_operations=("attention", "norm", "ffn")),
        {},
    ),
    ("dense", dict(tensor=2, recompute="operations", recompute_operations=("ffn",)), {}),
    ("mixture", dict(tensor=2, shard=2, async_tensor=True, recompute="full"), {}),
    ("latent", dict(tensor=2, pipeline=2, async_tensor=True), {}),
    ("latent", dict(tensor=2, context=2, context_method="gather", shard=2), {}),
    ("latent", dict(tensor=2, context=2, context_method="ulysses", recompute="full"), {}),
    ("parallel", dict(tensor=2, context=2, recompute="full"), {}),
    ("tied", dict(tensor=2, pipeline=2, shard=2), {}),
    ("tied", dict(tensor=2, pipeline=2, schedule="zb-v"), {}),
    ("tied", dict(replicate=2, shard=2, pipeline=2), dict(dtype="bfloat16")),
    ("dense", dict(tensor=2, context=2), dict(dtype="bfloat16", reduce_dtype="bfloat16")),
    ("dense", dict(replicate=4), dict(dtype="bfloat16", reduce_dtype="bfloat16")),
    ("dense", dict(replicate=2), dict(dtype="bfloat16", reduce_dtype="float64")),
    ("dense", dict(tensor=2, pipeline=2), dict(dtype="bfloat16")),
    ("mixture", dict(tensor=2, shard=2, expert=2, expert_tensor=True), dict(dtype="bfloat16")),
    ("dense", dict(replicate=2, tensor=2, shard=2, zero=2), dict(dtype="float32")),
    ("mixture", dict(tensor=2, shard=4, expert=2, expert_tensor=True), dict(optimizer="muon")),
]


@pytest.mark.parametrize(("model", "layout", "more"), COMBINATIONS, ids=str)
def test_combinations(ranks: RankPool, model: str, layout: dict[str, Any], more: dict[str, Any]) -> None:
    check(ranks, cases.make_run(model, layout, **more))


@pytest.mark.parametrize(
    ("model", "layout", "more"),
    [*cases.FEWER_EXPERTS_THAN_RANKS, ("few", dict(shard=4, expert=2), dict(dtype="bfloat16", optimizer="muon"))],
    ids=str,
)
def test_fewer_experts_than_ranks_that_share_them(
    ranks: RankPool, model: str, layout: dict[str, Any], more: dict[str, Any]
) -> None:
    check(ranks, cases.make_run(model, layout, **dict(microbatch=1) | more))


def known_calls(rank: int) -> Traffic:
    everyone, some = dist.group.WORLD, dist.new_group([0, 1])
    assert everyone is not None
    names = {everyone.group_name: "three"} | ({some.group_name: "two"} if rank < 2 else {})
    mine, all_of_it = torch.ones(5), torch.empty(15)
    with TrafficCounter(names) as counter:
        dist.all_reduce(mine)
        dist.all_gather_into_tensor(all_of_it, mine)
        dist.all_gather([torch.empty(5) for _ in range(3)], mine)
        dist.reduce_scatter_tensor(mine, all_of_it)
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
        with pytest.raises(NotImplementedError):
            dist.broadcast(mine, 0)
    return counter.traffic


def test_counter_sees_every_call(ranks: RankPool) -> None:
    both = {("three", "all_reduce"): Fraction(2 * 2 * 20, 3), ("three", "all_gather"): 2 * 2 * 20,
            ("three", "reduce_scatter"): 2 * 20, ("three", "all_to_all"): 2 * 20}  # fmt: skip
    first = both | {("two", "all_to_all"): 2 * 4, ("two", "send"): 20}
    second = both | {("two", "all_to_all"): 1 * 4, ("two", "send"): 20}
    assert ranks.run(3, known_calls) == [first, second, both]


def ring_work(rank: int, length: int) -> tuple[int, int]:
    """Of a causal attention over the ring, forward and backward, the (query, key) pairs a rank computes, and those seen."""
    computed = seen = 0

    def count(q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        nonlocal computed, seen
        pairs = q.shape[-2] * k.shape[-2]
        computed += pairs
        seen += pairs if mask is None else int(mask.sum())

    forward, backward = context.attend_block, context.attend_block_backward

    def counted_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Any:
        count(q, k, mask)
        return forward(q, k, v, scale, mask)

    def counted_backward(grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, *rest: Any) -> Any:
        count(q, k, rest[-1])
        return backward(grad, delta, q, k, *rest)

    group = dist.group.WORLD
    assert group is not None
    part = length // group.size()
    q, k, v = (torch.ones(1, part, 1, 2, requires_grad=True) for _ in "qkv")
    with mock.patch.multiple(context, attend_block=counted_forward, attend_block_backward=counted_backward):
        out = context.RingAttention(1.0, group)(q, k, v, context.ContextMask(None, 0))
        out.sum().backward()
    return computed, seen


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_of_the_ring_is_balanced(ranks: RankPool, size: int) -> None:
    length = 16 * size
    work = ranks.run(size, ring_work, length)
    for kind in zip(*work, strict=True):
        assert max(kind) - min(kind) <= 0.02 * min(kind)
    # Forward and backward, every pair that causal attention sees, once.
    assert sum(seen for _, seen in work) == 2 * length * (length + 1) // 2
    # Chunks that lie in the future are not computed: a rank's two chunks see 2c + 1 of the 4c pairs of chunks.
    assert sum(computed for computed, _ in work) == 2 * size * (2 * size + 1) * (length // (2 * size)) ** 2
