"""Every layout of a small job, listed one by one and planned in full: what a search is held to.

Nothing of `plan/search/` is used. A layout is in the list when it breaks no rule of `run/rules/check.py` and its choices are
those that a search has: powers of two as microbatch, every divisor of the devices as an axis. A choice that makes no
difference is taken once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from shardwise.plan.cost.job import job_of
from shardwise.plan.time.goodput import data_stall
from shardwise.plan.time.step import prepare, step_times
from shardwise.plan.trainer.memory import memory_of
from shardwise.run import Run, run_from_dict
from shardwise.run.derive import compiles, planned_on_gpu
from shardwise.run.rules.check import broken_rules

AXES = ("replicate", "shard", "context", "tensor", "pipeline")
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "gpipe", "breadth-first")
LOOPED = ("interleaved", "breadth-first")
DEFERRING = ("zb-h1", "zb-2p", "zb-v", "dualpipe-v")
FEW, MANY = 40, 400
"""The layouts that a drawn job has, at least and, if not said otherwise, at most."""


class Planned(NamedTuple):
    """A layout with the figures of its plan."""

    run: Run
    seconds: float
    peak: float
    fits: bool


def every_layout(run: Run, devices: int, per_node: int) -> Iterator[Run]:
    """The legal layouts of a run whose layout is `auto`, each once."""
    lay, fixed, model, batch = run.layout, run.layout.fixed, run.model, run.train.global_batch
    # Whether layers are compiled is settled by the run, and a layout that defers weight gradients does without.
    alone = replace(run, layout=replace(lay, auto=False, fixed=(), **dict.fromkeys(AXES, 1) | {"replicate": devices}))
    train = replace(run.train, compile=compiles(alone, gpu=planned_on_gpu(run)))
    inside = min(per_node, devices)
    cluster = replace(run.cluster, nodes=devices // inside, devices_per_node=inside)

    def free(name: str, values: Any) -> list[Any]:
        return [getattr(lay, name)] if name in fixed else list(values)

    every = [d for d in range(1, devices + 1) if devices % d == 0]
    experts = free("expert", [d for d in range(1, model.experts + 1) if model.experts % d == 0] or [1])
    microbatches = [run.train.microbatch] if run.train.microbatch else [2**k for k in range(batch.bit_length())]
    for axes in product(*(free(axis, every) for axis in AXES)):
        replicate, shard, context, tensor, pipeline = axes
        if replicate * shard * context * tensor * pipeline != devices:
            continue
        schedules = [
            (name, chunks)
            for name in free("schedule", SCHEDULES if pipeline > 1 else SCHEDULES[:1])
            for chunks in (free("chunks", _chunks(model.layers, pipeline)) if name in LOOPED else [lay.chunks])
        ]
        keys: dict[str, list[Any]] = dict(
            expert=experts,
            zero=free("zero", (3, 2, 1) if shard * context > 1 else (3,)),
            recompute=free("recompute", ("none", "attention", "full")),
            context_method=free("context_method", ("ring", "ulysses", "gather") if context > 1 else ("ring",)),
            async_tensor=free("async_tensor", (False, True) if tensor > 1 else (False,)),
            expert_tensor=free("expert_tensor", (False, True) if tensor > 1 and model.experts else (False,)),
        )
        for (schedule, chunks), microbatch, values in product(schedules, microbatches, product(*keys.values())):
            sizes = dict(zip(AXES, axes, strict=True)) | dict(zip(keys, values, strict=True))
            layout = replace(lay, auto=False, fixed=(), schedule=schedule, chunks=chunks, **sizes)
            defers = run.train.compile == "auto" and schedule in DEFERRING and pipeline > 1
            how = replace(train, microbatch=microbatch, compile=train.compile and not defers)
            one = replace(run, layout=layout, train=how, cluster=cluster)
            if next(iter(broken_rules(one)), None) is None:
                yield one


def _chunks(layers: int, pipeline: int) -> list[int]:
    """Stages a rank: all up to eight, and beyond those that cut the layers evenly, with or without the two ends."""
    most = (layers + 2) // pipeline
    return [v for v in range(2, most + 1) if v <= 8 or layers % (pipeline * v) == 0 or layers + 2 == pipeline * v]


def planned(runs: list[Run]) -> list[Planned]:
    """The figures of their plans."""
    jobs = [job_of(run) for run in runs]
    found = []
    for run, job, step in zip(runs, jobs, step_times([prepare(job) for job in jobs]), strict=True):
        memory = memory_of(run, job)
        seconds = step.seconds + data_stall(run, job.cluster, step.seconds)
        found.append(Planned(run, seconds, memory.peak, memory.fits))
    return found


def front(points: list[Planned], slower: float) -> list[Planned]:
    """Those that fit and that none beats in time and memory, in steps of 3% of memory: from the fastest on, whatever is leaner by
    that much than all before. Of equal times the leanest comes first. It ends at so many times the fastest step."""
    found: list[Planned] = []
    for one in sorted((p for p in points if p.fits), key=lambda p: (float(f"{p.seconds:.9g}"), p.peak)):
        if one.seconds <= slower * (found or [one])[0].seconds and all(one.peak < 0.97 * p.peak for p in found):
            found.append(one)
    return found


def draw_job(seed: int, number: int, most: int = MANY) -> tuple[Run, list[Run]]:
    """A small job, and its layouts, at most so many. Its memory is scarce: some layouts fit and some do not."""
    rng = random.Random(f"{seed} {number}")
    while True:
        run = _drawn(rng)
        devices = run.cluster.nodes * run.cluster.devices_per_node
        runs = []
        for one in every_layout(run, devices, run.cluster.devices_per_node):
            runs.append(one)
            if len(runs) > most:
                break
        if FEW <= len(runs) <= most:
            break
    some = [memory_of(one, job_of(one)) for one in rng.sample(runs, 24)]
    # So much of the chip's memory is left free that what fits is somewhere between nothing and everything.
    wanted = rng.choice(sorted(one.peak for one in some))
    whole = some[0].capacity / (1.0 - run.cluster.headroom)
    spare = round(min(max(1.0 - wanted / whole, 0.0), 0.999), 4)
    cluster = replace(run.cluster, headroom=spare)
    runs = [replace(one, cluster=replace(one.cluster, headroom=spare)) for one in runs]
    return replace(run, cluster=cluster), runs


def _drawn(rng: random.Random) -> Run:
    """A run, with some of its layout fixed."""
    heads = rng.choice((4, 6, 8, 16))
    hidden = heads * rng.choice((64, 128, 256))
    model: dict[str, Any] = dict(
        layers=rng.choice((2, 3, 4, 6, 8, 12)), heads=heads, kv_heads=rng.choice((heads, heads // 2)), hidden=hidden,
        ffn=rng.choice((2, 3, 4)) * hidden, vocab=rng.choice((512, 32000, 128256)), tied_embeddings=rng.random() < 0.3,
    )  # fmt: skip
    if rng.random() < 0.3:
        model |= dict(
            experts=rng.choice((4, 8)), experts_per_token=2, expert_ffn=hidden, dense_layers=rng.choice((0, 1))
        )
    devices = rng.choice((1, 2, 4, 4, 6, 8, 8, 16, 16, 32, 64))
    per_node = rng.choice([n for n in (1, 2, 4, 8) if devices % n == 0])
    train = dict(
        global_batch=rng.choice((4, 8, 16, 32, 48, 64, 128)), seq_len=rng.choice((512, 2048, 4096, 32768)), dtype="bfloat16",
        microbatch=rng.choice((0, 0, 1, 1, 2)), optimizer=rng.choice(("adamw", "adamw", "adamw", "muon")),
    )  # fmt: skip
    usual: dict[str, list[Any]] = dict(
        replicate=[1, 2], shard=[1, 2, 4], context=[1, 1, 2], tensor=[1, 1, 2], pipeline=[1, 2, 4], zero=[1, 2, 3],
        recompute=["none", "full", "attention"], context_method=["ring", "ulysses", "gather"], async_tensor=[False, True],
        schedule=["1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "gpipe", "breadth-first"],
    )  # fmt: skip
    names = rng.sample(sorted(usual), rng.choice((0, 1, 2, 3, 4)))
    layout = dict(auto=True) | {name: rng.choice(usual[name]) for name in names}
    cluster = dict(
        chip=rng.choice(("h100", "h100", "a100-80g", "b200")), nodes=devices // per_node, devices_per_node=per_node
    )
    return run_from_dict(dict(model=model, layout=layout, train=train, cluster=cluster))
