"""Every layout a job may take: which sizes and choices are legal together, and the list of them all.

The rules are those of `run/rules/check.py`, evaluated with arrays in place of sizes, one entry per layout. A choice that changes
nothing is listed once: a pipeline of one rank has one schedule, a sequence on one context rank has one context method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from shardwise.run import AXES, LayoutConfig, Run
from shardwise.run.axes import ASYNCHRONOUS, BIDIRECTIONAL, LOOPED, SPLIT_BACKWARD, V_SHAPED
from shardwise.run.rules.check import batch_rules, fp8_rules, layout_rules
from shardwise.run.rules.rule import Rule

Array = Any  # of integers, one entry per layout

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "gpipe", "breadth-first")
ASKED = ("bpipe", *BIDIRECTIONAL, *ASYNCHRONOUS)
"""Schedules that a search takes only where a run names them: their time depends on transfers that screening does not model."""
RECOMPUTE = ("none", "attention", "full")
METHODS = ("ring", "ulysses", "gather")
SOME_CHUNKS = 8
"""Up to this many stages per rank every number is tried; beyond, only those that split the layers evenly."""


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
        """A selection of the sizes."""
        return Sizes(*(column[index] for column in self))

    def into(self, layout: LayoutConfig) -> LayoutConfig:
        """The layout with these sizes."""
        return replace(layout, **{name: getattr(self, name) for name in self._fields if name != "microbatch"})


@dataclass(frozen=True)
class Choices:
    """The choices of a layout besides its sizes: the values each key may take. The first is used where it makes no difference."""

    zero: tuple[int, ...]
    recompute: tuple[str, ...]
    context_method: tuple[str, ...]
    async_tensor: tuple[bool, ...]
    expert_tensor: tuple[bool, ...]


BETWEEN = (
    "compress", "compress_warmup", "compress_weights", "compress_shards", "sync_every", "sync_fragments", "sync_overlap",
    "sync_elastic", "secondary_shard",
)  # fmt: skip
"""Keys about the traffic between replicas or between shards: legal only where there are any."""


NAMED = ("recompute_operations", "recompute_budget", "offload")
"""Keys that the search does not choose: every layout takes the run's value."""


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def legal(run: Run, *more: Iterable[Rule]) -> Array:
    """Which layouts satisfy the rules of `run/rules/check.py` on network and layout, and `more`. Sizes may be arrays."""
    return np.logical_not(reduce(or_, (rule.broken for rule in chain(layout_rules(run), fp8_rules(run), *more))))


def choices(run: Run) -> Choices:
    """The legal values of each key that is not fixed; a key that the user fixed has one."""
    lay, fixed = run.layout, run.layout.fixed

    def free(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        return (getattr(lay, name),) if name in fixed else tuple(values)

    one = replace(_one_rank(lay), **{name: getattr(lay, name) for name in NAMED})

    def keeps(**words: Any) -> bool:
        return bool(legal(replace(run, layout=replace(one, **words))))

    recompute = tuple(r for r in free("recompute", RECOMPUTE) if keeps(recompute=r))
    overlaps = [a for a in (False, True) if all(keeps(recompute=r, async_tensor=a) for r in recompute)]
    return Choices(
        zero=free("zero", (3, 2, 1) if lay.secondary_shard == 1 else (3,)),
        recompute=recompute,
        context_method=free("context_method", METHODS),
        async_tensor=free("async_tensor", overlaps),
        expert_tensor=free("expert_tensor", (False, True) if run.model.experts else (False,)),
    )


def schedules(run: Run, pipeline: int) -> list[tuple[str, int]]:
    """The schedules and stages per rank of a pipeline of `pipeline` ranks for which there are enough layers."""
    lay, layers, fixed = run.layout, run.model.layers, run.layout.fixed
    names: tuple[str, ...] = (lay.schedule,) if "schedule" in fixed else SCHEDULES
    if pipeline == 1:
        names = names[:1]
    elif run.train.compile is True:
        names = tuple(name for name in names if name not in SPLIT_BACKWARD)
    found: list[tuple[str, int]] = []
    for name in names:
        most = (layers + 2) // pipeline  # the first and the last stage may have no layer
        if name in LOOPED and "chunks" not in fixed:
            for v in range(2, most + 1):
                stages = pipeline * v
                if v <= SOME_CHUNKS or layers % stages == 0 or layers + 2 == stages:
                    found.append((name, v))
        elif name in LOOPED:
            found += [(name, lay.chunks)] * (lay.chunks <= most)
        elif name in BIDIRECTIONAL and pipeline > 1:
            found += [(name, lay.chunks)] * (pipeline % 2 == 0)
        elif name not in V_SHAPED or pipeline == 1 or most >= 2:
            found.append((name, lay.chunks))
    if lay.stages:
        layouts = [replace(lay, pipeline=pipeline, schedule=name, chunks=chunks) for name, chunks in found]  # type: ignore[arg-type]
        held = [layout.distinct_stages for layout in layouts]
        found = [one for one, stages in zip(found, held, strict=True) if stages == len(lay.stages)]
    return found


def plain(layout: LayoutConfig) -> LayoutConfig:
    """The layout with every choice at a value that rules nothing out."""
    return replace(layout, schedule="1f1b", chunks=1, zero=3, expert_tensor=False, async_tensor=False, context_method="ring",
                   stages=(), recompute="none", recompute_operations=(), recompute_budget=0.0, offload=False)  # fmt: skip


def _one_rank(layout: LayoutConfig) -> LayoutConfig:
    ones: dict[str, Any] = dict.fromkeys(AXES, 1)
    return replace(plain(layout), **ones, **{name: getattr(LayoutConfig(), name) for name in BETWEEN})


def sizes(run: Run, devices: int, most_microbatch: int = 0) -> Sizes:
    """All sizes that are legal on `devices` devices with some values of the other choices."""
    lay, fixed, batch = run.layout, run.layout.fixed, run.train.global_batch
    every = divisors(devices)
    usual = _one_rank(lay)

    def values(name: str) -> Array:
        return np.array([getattr(lay, name)] if name in fixed else every)

    def alone(name: str) -> Array:
        """The values of an axis that are legal with all other axes at 1."""
        own = values(name)
        return own[legal(replace(run, layout=replace(usual, **{name: own})))]

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
    cluster = replace(run.cluster, nodes=1, devices_per_node=devices)
    train = replace(run.train, microbatch=found.microbatch)
    spoken = replace(usual, **{name: getattr(lay, name) for name in BETWEEN})
    every_run = replace(run, layout=found.into(spoken), train=train, cluster=cluster)
    return found.at(np.flatnonzero(legal(every_run, batch_rules(every_run))))


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


def distinct(*columns: Array) -> tuple[list[Array], Array]:
    """The distinct rows of some columns, as columns of floats, and for each row the index of its distinct row."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, which = np.unique(column, return_inverse=True)
        code = code * len(values) + which
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return [column[first].astype(float) for column in columns], back.ravel()
