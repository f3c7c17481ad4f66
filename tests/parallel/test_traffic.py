"""Communication is what theory says: the bytes that each rank sends in a step, by axis and operation, equal to the byte the
formulas in the headings of `shardwise/parallel`, written here from the numbers of model and layout alone. Where the bytes depend
on the routing of tokens, they are counted from the experts that the routers chose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from parallel_pool import RankPool
from torch import Tensor, nn
from traffic_counter import AXES, Traffic, TrafficCounter, axes_by_group

from shardwise.model.experts import Router
from shardwise.parallel import context
from shardwise.run import Run
from shardwise.train.step import Trainee

NUMBER = 8  # bytes of a float64, and of a token count or an expert's number, which are int64
LOAD = 4  # bytes of a number of the routers' load, which stays float32
Choices = list[Tensor]  # what each call of a router chose, layer by layer within a microbatch


def counted_step(rank: int, run: Run, warm_up: int) -> tuple[Traffic, Choices]:
    """What a rank sends in one step, after some others, and what its routers chose in it."""
    trainee = Trainee(run)
    cases.steps(trainee, 0, warm_up, documents=False)
    choices: Choices = []

    def record(module: nn.Module, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        weights, chosen, _ = out
        choices.append(chosen[weights != 0])  # a choice beyond an expert's capacity has no weight and is not sent

    for router in trainee.routers:
        assert isinstance(router, Router)
        router.register_forward_hook(record)
    with TrafficCounter(axes_by_group(trainee)) as counter:
        cases.steps(trainee, warm_up, warm_up + 1, documents=False)
    return counter.traffic, choices


@dataclass(frozen=True)
class Place:
    """A rank of a run in numbers: sizes of all groupings, and where along them it stands."""

    run: Run
    rank: int

    @property
    def sizes(self) -> dict[str, int]:
        lay = self.run.layout
        zero = lay.shard * lay.context
        sizes = dict(zero=zero, expert_shard=zero // lay.expert, sequence=lay.context * lay.tensor, world=lay.world)
        return {axis: sizes[axis] if axis in sizes else getattr(lay, axis) for axis in AXES}

    @property
    def tensor(self) -> int:
        return self.rank % self.run.layout.tensor

    @property
    def zero(self) -> int:
        return self.rank // self.run.layout.tensor % self.sizes["zero"]

    @property
    def expert(self) -> int:
        return self.zero % self.run.layout.expert

    @property
    def pipeline(self) -> int:
        return self.rank * self.run.layout.pipeline // self.run.layout.world

    @property
    def tokens(self) -> int:
        """Of a microbatch, on this context rank."""
        return self.run.train.microbatch * self.run.train.seq_len // self.run.layout.context

    @property
    def mixtures(self) -> int:
        return self.run.model.layers - self.run.model.dense_layers if self.run.model.experts else 0


@dataclass(frozen=True)
class Weight:
    """A parameter as a rank holds it before sharding."""

    shape: tuple[int, ...]
    cut: bool = False  # over the tensor ranks
    routed: bool = False  # belongs to the routed experts
    outside: bool = False  # of the blocks

    def shard(self, ranks: int) -> int:
        """Numbers in a shard: rows are dealt out in equal pieces, the last ones padded."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])

    def shard_without_padding(self, ranks: int, rank: int) -> int:
        return _piece(self.shape[0], ranks, rank) * math.prod(self.shape[1:])


def _piece(length: int, ranks: int, rank: int) -> int:
    """Rows of a rank when they are dealt out in equal pieces, rounded up."""
    piece = -(-length // ranks)
    return max(0, min(piece, length - rank * piece))


def feed_forward(hidden: int, width: int, ranks: int) -> Iterator[Weight]:
    yield from (Weight((width // ranks, hidden), cut=True), Weight((width // ranks, hidden), cut=True))
    yield Weight((hidden, width // ranks), cut=True)


def weights(place: Place) -> Iterator[Weight]:
    """The parameters of a rank that holds all layers."""
    m, lay = place.run.model, place.run.layout
    t = lay.tensor
    vocabulary = Weight((_piece(m.vocab, t, place.tensor), m.hidden), cut=True, outside=True)
    yield from (vocabulary, vocabulary, Weight((m.hidden,), outside=True))
    for layer in range(m.layers):
        yield from (Weight((m.hidden,)), Weight((m.hidden,)))
        yield from (
            Weight((m.heads * m.head_dim // t, m.hidden), cut=True),
            Weight((m.hidden, m.heads * m.head_dim // t), cut=True),
        )
        for _ in "kv":
            dealt = m.kv_heads >= t  # fewer heads than ranks: all of them on each rank
            yield Weight((m.kv_heads * m.head_dim // (t if dealt else 1), m.hidden), cut=dealt)
            if m.qk_norm:
                yield Weight((m.head_dim,))
        if not m.experts or layer < m.dense_layers:
            yield from feed_forward(m.hidden, m.ffn, t)
            continue
        yield Weight((m.experts, m.hidden))
        yield from feed_forward(m.hidden, m.shared_experts * m.expert_ffn, t)
        width = m.expert_ffn // (t if lay.expert_tensor else 1)
        for shape in ((width, m.hidden), (width, m.hidden), (m.hidden, width)):
            yield Weight((m.experts // lay.expert, *shape), cut=lay.expert_tensor, routed=True)


def data_traffic(place: Place) -> Traffic:
    """`shard.py`: parameters gathered, gradients scattered, and all-reduced over copies."""
    run, sizes, traffic = place.run, place.sizes, Traffic()
    if sizes["replicate"] == run.layout.world:
        traffic["replicate", "all-reduce"] = all_reduce(
            sum(math.prod(w.shape) for w in weights(place)), sizes["replicate"]
        )
        return traffic
    gathers = run.accumulation if run.layout.zero == 3 else 1
    reductions = 1 if run.layout.zero == 1 else run.accumulation
    for axis, routed in (("zero", False), ("expert_shard", True)):
        others = sizes[axis] - 1
        for weight in (w for w in weights(place) if w.routed == routed):
            shard = weight.shard(sizes[axis])
            again = run.layout.zero == 3 and not weight.outside
            traffic[axis, "all-gather"] += gathers * (2 if again else 1) * others * shard * NUMBER
            traffic[axis, "reduce-scatter"] += reductions * others * shard * NUMBER
            traffic["replicate", "all-reduce"] += all_reduce(shard, sizes["replicate"])
    return traffic


def all_reduce(numbers: int, ranks: int, number: int = NUMBER) -> Fraction:
    return Fraction(2 * (ranks - 1), ranks) * numbers * number


def tensor_traffic(place: Place) -> Traffic:
    """`tensor.py` and, for the sum of what is not cut, `gradients.py`."""
    run, sizes, traffic = place.run, place.sizes, Traffic()
    m, lay, t = run.model, run.layout, run.layout.tensor
    piece = Fraction(t - 1, t) * place.tokens * NUMBER  # what arrives of one number for every token
    # Attention, and the feed-forward layer: dense, or the shared experts; each gathered and scattered, forward and backward.
    sublayers = m.layers + m.layers - place.mixtures + (place.mixtures if m.shared_experts else 0)
    if lay.expert_tensor:
        sublayers += place.mixtures
        weights_and_choices = place.mixtures * m.experts_per_token * piece
        traffic["tensor", "all-gather"] += run.accumulation * 2 * weights_and_choices
        traffic["tensor", "reduce-scatter"] += run.accumulation * weights_and_choices
    again = m.layers * m.hidden * piece if lay.recompute == "full" else 0
    # The embedding is scattered forward, gathered backward; the head the other way round.
    for operation, times in (("all-gather", 2), ("reduce-scatter", 1)):
        stream = (2 * sublayers + 2) * m.hidden * piece
        traffic["tensor", operation] += run.accumulation * (stream + times * again)
    traffic["tensor", "all-reduce"] += run.accumulation * all_reduce(3 * place.tokens, t)
    for axis, routed in (("zero", False), ("expert_shard", True)):
        index = place.zero // lay.expert if routed else place.zero
        uncut = (w for w in weights(place) if not w.cut and w.routed == routed)
        held = sum(w.shard_without_padding(sizes[axis], index) for w in uncut)
        traffic["tensor", "all-reduce"] += all_reduce(held, t)
    return traffic


def context_traffic(place: Place) -> Traffic:
    """`context.py`: n numbers of keys (or values, as many) and of queries (or outputs, as many) on a rank."""
    run, traffic = place.run, Traffic()
    m, c, t = run.model, run.layout.context, run.layout.tensor
    times = run.accumulation * m.layers * NUMBER
    n_q = place.tokens * m.heads // t * m.head_dim
    n_kv = place.tokens * max(1, m.kv_heads // t) * m.head_dim
    match run.layout.context_method:
        case "ring":
            traffic["context", "send"] = times * (2 * (c - 1) + 2 * (c - 1) + 2 * c) * n_kv if c > 1 else 0
        case "gather":
            traffic["context", "all-gather"] = traffic["context", "reduce-scatter"] = times * 2 * (c - 1) * n_kv
        case "ulysses":
            n_kv = n_kv if max(1, m.kv_heads // t) % c == 0 else n_q
            traffic["context", "all-to-all"] = 2 * times * Fraction(c - 1, c) * (2 * n_q + 2 * n_kv)
    return traffic


def pipeline_traffic(place: Place) -> Traffic:
    """`pipeline.py`, and the sum of a tied embedding's gradients in `gradients.py`."""
    run, traffic = place.run, Traffic()
    m, p = run.model, run.layout.pipeline
    if p == 1:
        return traffic
    last = p * run.layout.stages_per_rank - 1
    stages = range(place.pipeline, last + 1, p)
    messages = sum((stage < last) + (stage > 0) for stage in stages)
    stream = place.tokens // run.layout.tensor * m.hidden * NUMBER
    traffic["pipeline", "send"] = run.accumulation * messages * stream
    if m.tied_embeddings and place.pipeline in (0, p - 1):
        traffic["pipeline", "all-reduce"] = all_reduce(m.vocab * m.hidden, 2)
    return traffic


def expert_traffic(place: Place, choices: list[Choices]) -> Traffic:
    """`expert.py`: rows to the ranks of their experts and back, forward and backward, and the counts before."""
    run, sizes, traffic = place.run, place.sizes, Traffic()
    m, lay = run.model, run.layout
    if not place.mixtures:
        return traffic
    calls = run.accumulation * place.mixtures
    sums = 2 * run.train.microbatch * m.experts  # tokens and probabilities of each expert in each sequence
    traffic["sequence", "all-reduce"] = calls * all_reduce(sums, sizes["sequence"])
    if m.expert_capacity:
        chosen = place.tokens // lay.tensor * m.experts_per_token
        traffic["sequence", "all-gather"] = calls * (sizes["sequence"] - 1) * chosen * NUMBER
    for axis in ("replicate", "zero", "tensor"):
        traffic[axis, "all-reduce"] += place.mixtures * all_reduce(m.experts, sizes[axis], LOAD)
    if lay.expert > 1:
        counts = Fraction(lay.expert - 1, lay.expert) * calls * m.experts
        first = (place.zero - place.expert) * lay.tensor  # of the ranks that the experts are dealt out over
        moved = 0
        for expert in range(lay.expert):
            base = first + expert * lay.tensor
            senders = range(base, base + lay.tensor) if lay.expert_tensor else [base + place.tensor]
            owners = torch.cat([c.flatten() for s in senders for c in choices[s]]) // (m.experts // lay.expert)
            if expert == place.expert:
                moved += int((owners != place.expert).sum())
            else:
                moved += int((owners == place.expert).sum())
        traffic["expert", "all-to-all"] = (counts + 2 * moved * m.hidden) * NUMBER
    return traffic


def small_traffic(place: Place) -> Traffic:
    """`train/step.py`: the squared norm of the gradient, the loss and the count of its tokens."""
    return Counter({("world", "all-reduce"): all_reduce(3, place.run.layout.world)})


def expected_traffic(place: Place, choices: list[Choices]) -> Traffic:
    """What theory says a rank sends in a step, axes that share a communicator named together."""
    parts: list[Traffic] = [
        data_traffic(place), tensor_traffic(place), context_traffic(place), pipeline_traffic(place),
        expert_traffic(place, choices), small_traffic(place),
    ]  # fmt: skip
    everyone = "+".join(axis for axis in AXES if place.sizes[axis] == place.run.layout.world)
    total: Traffic = Counter()
    for part in parts:
        for (axis, operation), size in part.items():
            total[everyone if place.sizes[axis] == place.run.layout.world else axis, operation] += size
    return Counter({key: size for key, size in total.items() if size})


def check(ranks: RankPool, run: Run, warm_up: int = 0) -> None:
    """Count a step of several microbatches on every rank, and hold it against theory."""
    assert run.accumulation > 1
    results = ranks.run(run.layout.world, counted_step, run, warm_up)
    choices = [chosen for _, chosen in results]
    for rank, (counted, _) in enumerate(results):
        assert counted == expected_traffic(Place(run, rank), choices), f"rank {rank}"


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
    both = {("three", "all-reduce"): Fraction(2 * 2 * 20, 3), ("three", "all-gather"): 2 * 2 * 20,
            ("three", "reduce-scatter"): 2 * 20, ("three", "all-to-all"): 2 * 20}  # fmt: skip
    first = both | {("two", "all-to-all"): 2 * 4, ("two", "send"): 20}
    second = both | {("two", "all-to-all"): 1 * 4, ("two", "send"): 20}
    assert ranks.run(3, known_calls) == [first, second, both]


def ring_work(rank: int, length: int) -> tuple[int, int]:
    """Of a causal attention over the ring, forward and backward, the (query, key) pairs a rank computes, and those seen."""
    computed = seen = 0

    def count(q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        nonlocal computed, seen
        pairs = q.shape[-2] * k.shape[-2]
        computed += pairs
        seen += pairs if mask is None else int(mask.sum())

    forward, backward = context.attend_piece, context.attend_piece_backward

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
    with mock.patch.multiple(context, attend_piece=counted_forward, attend_piece_backward=counted_backward):
        out = context.RingDotProduct(1.0, group)(q, k, v, context.ContextMask(None, 0))
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
