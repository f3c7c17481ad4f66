"""What a rank recomputes to stay within a budget: whole layers, the largest first (`budget`), or in each layer the tensors that
take the least time to recompute for the bytes they free (`optimal`, `cost/rematerialization.py`). Both use the cost model's
estimate of the bytes that a layer saves. The trainer takes its choice from here too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from shardwise.plan.cost.job import GIB, job_of
from shardwise.plan.cost.memory import layer_saved
from shardwise.plan.cost.operations import layer
from shardwise.plan.cost.ops import FORWARD
from shardwise.plan.cost.rematerialization import SAVED, fewest_seconds, graph, layer_choices, may_leave
from shardwise.run import Run
from shardwise.run.saved_tensors import ELSEWHERE

WHOLE, NOTHING = frozenset({"block"}), frozenset[str]()


def recomputed(run: Run, layers: Sequence[int], entering: float) -> Mapping[int, frozenset[str]]:
    """The recomputed parts of each of these layers, which are all layers of a rank; `entering` bytes enter each layer."""
    kinds = {n: run.model.is_moe(n) for n in layers}
    if run.memory.swaps and run.layout.recompute == "none":
        leave = partial(may_leave, run.model, context=run.layout.context)
        return {n: frozenset(f"{ELSEWHERE}{word}" for word in leave(routed=moe)) for n, moe in kinds.items()}
    if run.layout.recompute == "optimal":
        return dict(zip(layers, _optimal(run, tuple(kinds.values())), strict=True))
    if run.layout.recompute != "budget":
        return {}
    sizes = {moe: _layer_saved(_saves_all(run), moe) for moe in set(kinds.values())}
    saved = {n: sizes[moe] for n, moe in kinds.items()}
    total, found = sum(saved.values()), dict.fromkeys(layers, NOTHING)
    for number in sorted(layers, key=lambda n: -saved[n]):
        if total <= run.layout.recompute_budget * GIB:
            break
        total += entering - saved[number]
        found[number] = WHOLE
    return found


def saved_by_layers(run: Run, layers: Sequence[int], entering: float) -> float:
    """Bytes that these layers of a rank still save for a microbatch, which a budget limits, by the same cost model."""
    m, chosen, plain = run.model, recomputed(run, layers, entering), _saves_all(run)
    if run.layout.recompute == "budget":
        return sum(entering if chosen[n] else _layer_saved(plain, m.is_moe(n)) for n in layers)
    sizes = {moe: graph(job_of(plain), routed=moe) for moe in {m.is_moe(n) for n in layers}}
    away = sum(sizes[m.is_moe(n)][word.removeprefix(ELSEWHERE)].size for n in layers for word in chosen[n])
    return sum(_layer_saved(plain, m.is_moe(n)) for n in layers) - away


class GreedyComparison(NamedTuple):
    """What a rank rematerializes, compared with recomputing whole layers."""

    layers: dict[str, int]
    """How many layers rematerialize or offload a tensor, by its name."""
    seconds: float
    """Seconds that this takes for a microbatch."""
    greedy: float
    """Seconds to recompute whole layers instead, as many as the same budget requires."""


def compare_with_greedy(run: Run, layers: Sequence[int], entering: float) -> GreedyComparison:
    """Seconds that `optimal` takes for these layers of a rank, and that `budget` would, from the forward passes of their ops."""
    job, m = job_of(run), run.model
    tensors = {moe: graph(job, routed=moe) for moe in {m.is_moe(n) for n in layers}}
    chosen = recomputed(run, layers, entering)
    greedy = recomputed(replace(run, layout=replace(run.layout, recompute="budget")), layers, entering)
    named = [f"{place}{word}" for place in ("", ELSEWHERE) for word in SAVED]
    ops = {moe: layer(job, routed=moe) for moe in tensors}
    stops = job.framework.early_stop
    whole = {
        moe: sum(float(op.seconds[FORWARD]) for op in some if not (stops and op.early_stop))
        for moe, some in ops.items()
    }
    return GreedyComparison(
        {word: count for word in named if (count := sum(word in words for words in chosen.values()))},
        sum(t.seconds for n, words in chosen.items() for word, t in tensors[m.is_moe(n)].items() if word in words),
        sum(whole[m.is_moe(n)] for n, parts in greedy.items() if parts),
    )


@lru_cache(maxsize=16)
def _optimal(run: Run, kinds: tuple[bool, ...]) -> tuple[frozenset[str], ...]:
    """The dropped tensors of layers of these kinds. They depend on the chip that the run is planned for, not on the device it runs
    on, and not on whether it is compiled."""
    plain = _saves_all(run)
    job = job_of(replace(plain, memory=run.memory))
    known = {moe: layer_choices(job, graph(job, routed=moe), layer(job, routed=moe)) for moe in set(kinds)}
    spare = sum(_layer_saved(plain, moe) for moe in kinds) - run.layout.recompute_budget * GIB
    return tuple(choice.dropped for choice in fewest_seconds(tuple(known[moe] for moe in kinds), spare))


def _saves_all(run: Run) -> Run:
    train = replace(run.train, device="auto", compile=False) if run.layout.recompute == "optimal" else run.train
    layout = replace(run.layout, recompute="none", recompute_budget=0.0)
    return replace(run, layout=layout, train=train, memory=replace(run.memory, activations="device"))


@lru_cache(maxsize=64)
def _layer_saved(run: Run, moe: bool) -> float:
    """Bytes that a layer saves by the cost model, cached: every stage of every rank asks, for every budget tried."""
    return layer_saved(job_of(run), routed=moe)
