"""Every layout a job may take: which sizes and choices are legal together, and the list of them all.

The rules are those of `run/check.py`, said once more over arrays, one entry a layout; a test holds the two against each
other. What changes nothing is listed once: a pipeline of one rank has one schedule, a whole sequence one context method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardwise.run import LayoutConfig, Run
from shardwise.run.derive import REPEATS_PARTS

Array = Any  # of whole numbers, one entry a layout

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "gpipe", "breadth-first")
LOOPED = ("interleaved", "breadth-first")
V_SHAPED = ("zb-v", "dualpipe-v")
RECOMPUTE = ("none", "attention", "full")
METHODS = ("ring", "ulysses", "gather")
SOME_CHUNKS = 8
"""Up to so many stages a rank all are tried; beyond, only those that cut the layers evenly."""


class Sizes(NamedTuple):
    """The sizes of layouts, as arrays."""

    replicate: Array
    shard: Array
    context: Array
    tensor: Array
    pipeline: Array
    expert: Array
    microbatch: Array

    def at(self, index: Any) -> Sizes:
        """Some of them."""
        return Sizes(*(column[index] for column in self))

    def into(self, layout: LayoutConfig) -> LayoutConfig:
        """The layout with these sizes."""
        return replace(layout, **{name: getattr(self, name) for name in self._fields if name != "microbatch"})


@dataclass(frozen=True)
class Choices:
    """What a layout chooses besides sizes: the values each key may take. The first is for where it makes no difference."""

    zero: tuple[int, ...]
    recompute: tuple[str, ...]
    context_method: tuple[str, ...]
    async_tensor: tuple[bool, ...]
    expert_tensor: tuple[bool, ...]


def divisors(number: int) -> list[int]:
    """In order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def stages_per_rank(layout: LayoutConfig) -> Array:
    """`LayoutConfig.stages_per_rank` where the pipeline's size is an array."""
    if layout.schedule in LOOPED:
        return layout.chunks
    return np.where(np.asarray(layout.pipeline) > 1, 2, 1) if layout.schedule in V_SHAPED else 1


def legal(run: Run, layout: LayoutConfig, microbatch: Array, devices: int) -> Array:
    """Which of the layouts, whose sizes may be arrays, keep every rule of `run/check.py` on so many devices."""
    lay = layout
    whole = run.train.global_batch % (microbatch * lay.replicate * lay.shard) == 0
    world = lay.replicate * lay.shard * lay.context * lay.tensor * lay.pipeline
    return network_legal(run, lay) & whole & (world == devices)


def network_legal(run: Run, layout: LayoutConfig) -> Array:
    """The rules that speak of the network and the layout, without those of the batch and the devices."""
    m, lay, train = run.model, layout, run.train
    t, c, heads = lay.tensor, lay.context, m.heads
    good = (heads % t == 0) & _words_legal(run, lay)
    if m.attention == "grouped":
        good = good & ((m.kv_heads % t == 0) | (t % m.kv_heads == 0))
    if not m.experts or m.dense_layers:
        good = good & (m.ffn % t == 0)
    if m.experts and lay.expert_tensor:
        good = good & (m.expert_ffn % t == 0)
    if m.experts and m.shared_experts:
        good = good & (m.expert_ffn * m.shared_experts % t == 0)
    good = good & ((np.equal(t, 1)) | (train.seq_len % (t * c) == 0))
    good = good & ((np.equal(c, 1)) | (train.seq_len % (2 * c) == 0))
    if lay.context_method == "ulysses":
        good = good & ((np.equal(c, 1)) | (heads % (t * c) == 0))
    stages = lay.pipeline * stages_per_rank(lay)
    good = good & (stages <= m.layers)
    if lay.stages:
        good = good & (stages == len(lay.stages)) & (sum(lay.stages) == m.layers) & (min(lay.stages) >= 1)
    spread = (m.experts % lay.expert == 0) & (lay.shard * c % lay.expert == 0) & (m.experts > 0)
    return good & (np.equal(lay.expert, 1) | spread)


def _words_legal(run: Run, lay: LayoutConfig) -> bool:
    """The rules about keys that are never arrays."""
    known = all(word in ("attention", "norm", "ffn") for word in lay.recompute_operations)
    parts = (lay.recompute == "operations") == bool(lay.recompute_operations)
    budget = (lay.recompute == "budget") == (lay.recompute_budget > 0)
    whole = run.train.compile is not True or lay.recompute not in REPEATS_PARTS
    return known and parts and budget and whole and not (lay.offload and run.train.device == "cpu")


def choices(run: Run) -> Choices:
    """The values of each key that is not fixed; what a user fixed has one."""
    lay, fixed = run.layout, run.layout.fixed

    def free(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        return (getattr(lay, name),) if name in fixed else tuple(values)

    experts = (False, True) if run.model.experts else (False,)
    return Choices(
        zero=free("zero", (3, 2, 1)),
        recompute=tuple(r for r in free("recompute", RECOMPUTE) if _words_legal(run, replace(lay, recompute=r))),
        context_method=free("context_method", METHODS),
        async_tensor=free("async_tensor", (False, True) if run.train.fp8 == "none" else (False,)),
        expert_tensor=free("expert_tensor", experts),
    )


def schedules(run: Run, pipeline: int) -> list[tuple[str, int]]:
    """Schedules and stages a rank for a pipeline of that many ranks, those that the layers suffice for."""
    lay, layers, fixed = run.layout, run.model.layers, run.layout.fixed
    names: tuple[str, ...] = (lay.schedule,) if "schedule" in fixed else SCHEDULES
    if pipeline == 1:
        names = names[:1]
    found: list[tuple[str, int]] = []
    for name in names:
        most = layers // pipeline
        if name in LOOPED and "chunks" not in fixed:
            even = (v for v in range(2, most + 1) if v <= SOME_CHUNKS or layers % (pipeline * v) == 0)
            found += [(name, v) for v in even]
        elif name in LOOPED:
            found += [(name, lay.chunks)] * (lay.chunks <= most)
        elif name not in V_SHAPED or pipeline == 1 or most >= 2:
            found.append((name, lay.chunks))
    if lay.stages:
        found = [one for one in found if pipeline * _held(one, pipeline) == len(lay.stages)]
    return found


def _held(schedule: tuple[str, int], pipeline: int) -> int:
    return int(stages_per_rank(LayoutConfig(pipeline=pipeline, schedule=schedule[0], chunks=schedule[1])))  # type: ignore[arg-type]


def plain(layout: LayoutConfig) -> LayoutConfig:
    """The layout with every choice at what rules nothing out."""
    return replace(layout, schedule="1f1b", chunks=1, zero=3, expert_tensor=False, async_tensor=False, context_method="ring",
                   stages=(), recompute="none", recompute_operations=(), recompute_budget=0.0, offload=False)  # fmt: skip


def sizes(run: Run, devices: int, most_microbatch: int = 0) -> Sizes:
    """All sizes that are legal on so many devices with some choice of the rest."""
    lay, fixed, batch = run.layout, run.layout.fixed, run.train.global_batch
    every = divisors(devices)
    ones = dict.fromkeys(("replicate", "shard", "context", "tensor", "pipeline", "expert"), 1)

    def values(name: str) -> Array:
        return np.array([getattr(lay, name)] if name in fixed else every)

    usual = plain(lay)

    def alone(name: str) -> Array:
        """The values that an axis may take whatever the others are."""
        own = values(name)
        return own[network_legal(run, replace(usual, **{**ones, name: own}))]

    t, c, p, r = (
        grid.ravel()
        for grid in np.meshgrid(
            alone("tensor"), alone("context"), alone("pipeline"), values("replicate"), indexing="ij"
        )
    )
    s = devices // (t * c * p * r)
    keep = (s * t * c * p * r == devices) & (batch % np.maximum(s * r, 1) == 0)
    if "shard" in fixed:
        keep &= s == lay.shard
    t, c, p, r, s = (column[keep] for column in (t, c, p, r, s))
    experts = [lay.expert] if "expert" in fixed else divisors(run.model.experts) if run.model.experts else [1]
    micro = [run.train.microbatch] if run.train.microbatch else _doublings(most_microbatch or batch)
    which, b, e = (g.ravel() for g in np.meshgrid(np.arange(len(t)), micro, experts, indexing="ij"))
    found = Sizes(r[which], s[which], c[which], t[which], p[which], e, b)
    return found.at(np.flatnonzero(legal(run, found.into(usual), found.microbatch, devices)))


def _doublings(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]


def with_choices(run: Run, size: Sizes, words: dict[str, Any], devices: int, per_node: int) -> Run:
    """The run with one layout filled in, as a user would have written it."""
    keys: dict[str, Any] = {name: int(value) for name, value in size._asdict().items()}
    train = replace(run.train, microbatch=keys.pop("microbatch"))
    layout = replace(run.layout, auto=False, fixed=(), **keys, **words)
    inside = min(per_node, devices)
    cluster = replace(run.cluster, nodes=devices // inside, devices_per_node=inside)
    return replace(run, train=train, layout=layout, cluster=cluster)
