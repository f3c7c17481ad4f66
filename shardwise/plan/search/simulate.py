"""Step seconds of many layouts by simulating their schedules: the same as `plan/time/step.py` for one layout, but over arrays.

Layouts of one group, schedule and method are read from the tables together, and those of one schedule are simulated together. So
most of the cost is a schedule's list of actions; each further layout on it adds little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardwise.plan.cost.job import job_of, overlapped
from shardwise.plan.cost.passes import ModuleCost, NetworkCost, Passes
from shardwise.plan.search.screen import Group, added_passes
from shardwise.plan.search.screened import LayoutIndex
from shardwise.plan.search.space import ASKED
from shardwise.plan.time.data import DataSeconds
from shardwise.plan.time.goodput import reading_seconds
from shardwise.plan.time.step import (
    copied_once,
    prepare,
    stage_passes,
    step_times,
    tail_seconds,
    update_seconds,
    waves_of,
    with_zero,
)  # fmt: skip
from shardwise.schedules import rounds_to_play

Array = Any
IndexedLayout = tuple[Group, LayoutIndex]


class _Costed(NamedTuple):
    """Layouts of one schedule: the seconds of its passes on each stage, and those outside the schedule."""

    which: Array
    microbatches: Array
    stages: Array
    """[forward, backward-input, backward-weight; stage; layout]"""
    wire: Array
    rest: Array


def simulate(places: Sequence[IndexedLayout]) -> list[float]:
    """Step seconds of each layout, equal to those of its plan."""
    if not places:
        return []
    space = places[0][0].space
    seconds = np.zeros(len(places))
    asked = "schedule" in space.run.layout.fixed and space.run.layout.schedule in ASKED
    if space.devices == 1 or asked:  # the tables hold no CUDA graphs, compute copies, hand-overs or mirrored gradients
        jobs = [job_of(group.run_at(index)) for group, index in places]
        seconds[:] = [step.seconds for step in step_times([prepare(job) for job in jobs])]
    else:
        alike: dict[tuple[Any, ...], list[int]] = {}
        for n, (group, index) in enumerate(places):
            mode = index.row // (group.shape[1] * group.shape[2])
            alike.setdefault((group, index.schedule, index.chunks, index.method, mode), []).append(n)
        shapes: dict[tuple[Any, ...], list[_Costed]] = {}
        for (group, schedule, chunks, method, mode), those in alike.items():
            which = np.array(those)
            rows = np.array([places[n][1].row for n in those])
            costed = _costed(group, schedule, chunks, method, mode, which, rows)
            for key, few in _by_rounds(group.pipeline, costed.microbatches):
                part = _Costed(*(x[..., few] for x in costed))
                shapes.setdefault((schedule, group.pipeline, costed.stages.shape[1], *key), []).append(part)
        for (schedule, pipeline, stages, *rounds), parts in shapes.items():
            one = _Costed(*(np.concatenate(x, axis=-1) for x in zip(*parts, strict=True)))
            spans = _makespans(one, schedule, pipeline, stages // pipeline, *rounds)
            seconds[one.which] = (spans + one.rest) * space.slower
    return np.maximum(seconds, [_reading(group, index) for group, index in places]).tolist()


def _reading(group: Group, index: LayoutIndex) -> float:
    size = group.sizes_at(index)
    return reading_seconds(group.space.run, group.space.job.cluster, size.replicate * size.shard, group.space.devices)


def _by_rounds(pipeline: int, microbatches: Array) -> list[tuple[tuple[int, int], Array]]:
    """Layouts grouped by the list of actions that they simulate."""
    if pipeline == 1:
        return [((1, 0), np.arange(len(microbatches)))]
    found: dict[tuple[int, int], list[int]] = {}
    for n, count in enumerate(microbatches.tolist()):
        found.setdefault(rounds_to_play(pipeline, count), []).append(n)
    return [(key, np.array(few)) for key, few in found.items()]


def _makespans(one: _Costed, schedule: str, pipeline: int, chunks: int, count: int, fewer: int) -> Array:
    if pipeline == 1:
        return one.microbatches * one.stages.sum(axis=(0, 1))
    waves = waves_of(schedule, pipeline, count, chunks)
    spans = waves.spans(one.stages, one.wire)
    if fewer:
        before = waves_of(schedule, pipeline, count - fewer, chunks).spans(one.stages, one.wire)
        more = waves.further(one.stages.sum(axis=0), spans - before, fewer)
        spans = spans + more * (one.microbatches - count)
    return spans


def _costed(
    group: Group, schedule: str, chunks: int, method: int, mode: int, which: Array, rows: Array
) -> _Costed:  # fmt: skip
    """The costs of some rows of a group under one schedule, method and recompute mode, read from the tables."""
    space, at = group.space, group.at(rows)
    job, constants = space.job, space.constants
    split = space.split(group.pipeline, schedule, chunks)
    name, overlap = group.methods[method]
    layers = group.layer_row[at.column]
    networks = {
        shared: _some(group.layers.network(space.choices.recompute[mode], name, overlap, shared), layers)
        for shared in {kind[4] for kind in split.kinds}
    }
    layout = replace(job.layout, context_method=name)  # type: ignore[arg-type]
    here = overlapped(replace(job, layout=layout), overlap)
    data = group.parameters.traffic(split, schedule, at.parameters)
    forward, inputs, weights = np.empty((3, len(split.kinds), len(rows)))
    for shared, network in networks.items():
        alike = [n for n, kind in enumerate(split.kinds) if kind[4] == shared]
        dense, moe, first, last = (column[:, None] for column in split.parts[alike].T)
        of_these = DataSeconds(*(x[alike] if np.ndim(x) else x for x in data))
        every = stage_passes(here, network.stage(dense, moe, first=first, last=last), of_these, constants)
        forward[alike], inputs[alike], weights[alike] = every.forward, every.backward_input, every.backward_weight
    own = Passes(forward, inputs, weights, {})
    zero = with_zero(own, data, constants)
    hop = constants["pipeline"] * group.of_size.hop[at.column]
    blocks = hop if job.framework.pipeline_blocks else 0.0 * hop
    kinds = list(split.stages)
    stages = np.array(
        [(zero.forward + blocks)[kinds], (zero.backward_input + blocks)[kinds], zero.backward_weight[kinds]]
    )
    work = added_passes(split.ranks, own.forward, own.backward_input, own.backward_weight)
    sent = DataSeconds(*(split.ranks @ x for x in data))
    rest = tail_seconds(job, work, sent, constants).max(axis=0) + update_seconds(job, sent, constants).max(axis=0)
    rest = rest + copied_once(sent, at.microbatches, constants).max(axis=0)
    if job.forward_passes:  # of a frozen network, as in `step.py`
        busiest = (split.ranks @ (zero.forward + blocks)).max(axis=0)
        rest = rest + job.forward_passes * (stages[0].sum(axis=0) + (at.microbatches - 1) * busiest)
    return _Costed(which, at.microbatches, stages, hop - blocks, rest + constants["overhead"])


def _some(network: NetworkCost, rows: Array) -> NetworkCost:
    """The network for some rows of the table."""
    return NetworkCost(*(_taken(m, rows) for m in (network.embedding, network.dense, network.moe, network.head)))


def _taken(module: ModuleCost | None, rows: Array) -> Any:
    """The module for some rows of the table."""
    if module is None:
        return None
    seconds = [[_at(x, rows) for x in line] for line in module.seconds]
    return ModuleCost(seconds, [_at(x, rows) for x in module.launches])


def _at(value: Any, rows: Array) -> Any:
    return value[rows] if isinstance(value, np.ndarray) and value.ndim else value
