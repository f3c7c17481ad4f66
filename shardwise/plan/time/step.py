"""The time of one step: the schedule's action list played with the seconds of each stage, the traffic of ZeRO and of the replicas
beside it, the optimizer and the constant overhead.

`prepare` asks the hardware model how long everything takes; `step_times` combines that under the fitted constants. Large pipelines
repeat themselves: beyond some microbatches each further round adds the same time. So a few rounds are played and the rest is
extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.hardware import collective_seconds
from shardwise.hardware.power import slowed
from shardwise.plan.cost.compression import agreement_seconds, hidden_seconds
from shardwise.plan.cost.constants import Constants, constants_of
from shardwise.plan.cost.host import host_bytes, link_of
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.memory import layer_activations
from shardwise.plan.cost.ops import span
from shardwise.plan.cost.parameters import cast_copies, stage_parameters
from shardwise.plan.cost.passes import Beside, ModuleCost, NetworkCost, Passes, exposed, host_seconds, passes
from shardwise.plan.time.data import DataSeconds, data_seconds
from shardwise.plan.time.waves import Waves
from shardwise.run import LayoutConfig
from shardwise.schedules import Cost, cached_schedule, rounds_to_play, time


@dataclass(frozen=True)
class Prepared:
    """A job with all times that depend on the hardware alone, before the fitted constants."""

    job: Job
    kinds: list[int]
    """For each stage, its index in `stages` and `data`, which list only different stages."""
    stages: list[ModuleCost]
    data: list[DataSeconds]
    hop: float


def prepare(job: Job) -> Prepared:
    """Asks the hardware model, once for identical stages."""
    layers = job.stage_layers
    held = stage_parameters(job, layers)  # type: ignore[arg-type]
    shared = _layers_of_ranks(job, layers)
    networks = NetworkCost.of_ranks(job, shared)
    seen: dict[tuple[int, int, bool, bool, int], int] = {}
    kinds, stages, data = list[int](), list[ModuleCost](), list[DataSeconds]()
    for n, (dense, moe) in enumerate(layers):
        first, last = job.layout.has_ends(n)
        key = (dense, moe, first, last, shared[n])
        if key not in seen:
            seen[key] = len(stages)
            stages.append(networks[shared[n]].stage(dense, moe, first=float(first), last=float(last)))
            data.append(data_seconds(job, held[n], (dense, moe), (float(first), float(last))))
        kinds.append(seen[key])
    return Prepared(job, kinds, stages, data, float(hop_seconds(job)))


def _layers_of_ranks(job: Job, layers: list[tuple[int, int]]) -> list[int]:
    """For each stage the number of layers of its rank, where these share a recompute budget; else 0."""
    if job.layout.recompute not in ("budget", "optimal"):
        return [0] * len(layers)
    placement = job.layout.placement
    return [
        sum(map(sum, (own for own, home in zip(layers, placement, strict=True) if home == rank))) for rank in placement
    ]


def hop_seconds(job: Job) -> Number:
    """Seconds of a transfer between two stages."""
    seconds = collective_seconds(job.cluster, "send", job.pipeline_bytes, *span(job, "pipeline"))
    return seconds * (job.layout.pipeline > 1)


def handing_seconds(job: Job) -> float:
    """Seconds in which BPipe's partners hand over a microbatch's saved tensors of the first stage, without its output."""
    if job.layout.schedule != "bpipe" or job.layout.pipeline < 4:  # fewer ranks have nothing to even out
        return 0.0
    dense, moe = job.stage_layers[0]
    saved = dense * layer_activations(job, routed=False)[0] + (moe and moe * layer_activations(job, routed=True)[0])
    held = stage_parameters(job, job.stage_layers)[0]  # type: ignore[arg-type]
    size = max(float(saved) + float(cast_copies(job, held)) - float(job.pipeline_bytes), 0.0)
    return float(collective_seconds(job.cluster, "send", size, *span(job, "pipeline")))


class ZeroPasses(NamedTuple):
    """The passes of a stage with ZeRO's work and its traffic beside them, and how much of that is exposed."""

    forward: Number
    backward_input: Number
    backward_weight: Number
    exposed: Number
    copied: Number
    """Seconds of `fully_shard`'s casts, copies and sums."""


def stage_passes(
    job: Job, stage: ModuleCost, data: DataSeconds, constants: Constants, load: float | None = None
) -> Passes:
    """The passes of a stage with these parameters, without ZeRO's traffic and copies, but at the clock that those allow."""
    copies = constants["memory"] * (data.copied_forward + data.copied_backward)
    return passes(job, stage, constants, Beside(copies, constants["data"] * (data.forward + data.backward)), load)


def with_zero(own: Passes, data: DataSeconds, constants: Constants, overlap: float = 1.0) -> ZeroPasses:
    """The passes with ZeRO's traffic, of which the share `overlap` can hide under them, and with its copies."""
    ahead, behind = constants["memory"] * data.copied_forward, constants["memory"] * data.copied_backward
    forward, inputs, weights = own.forward + ahead, own.backward_input, own.backward_weight + behind

    def beside(work: Number, traffic: Number) -> Number:
        traffic = constants["data"] * traffic
        hidden = np.minimum(work, overlap * traffic)
        return traffic - hidden + constants["contention"] * hidden

    before, after = beside(forward, data.forward), beside(inputs + weights, data.backward)
    return ZeroPasses(forward + before, inputs + after, weights, before + after, ahead + behind)


def slowdown(job: Job, constants: Constants) -> Number:
    """The factor by which a step takes longer where many machines wait for the slowest."""
    machines = np.maximum(job.layout.world / job.cluster.per_node, 1.0)
    return 1.0 + constants["jitter"] * np.log2(machines)


def tail_seconds(job: Job, own: Passes, data: DataSeconds, constants: Constants) -> Number:
    """Seconds of exposed traffic once a step, on a rank whose stages together have these passes and this traffic."""
    once, gather = constants["data"] * data.once, constants["data"] * data.gather_once
    if job.framework.gradients_overlap:
        once = np.maximum(once - own.backward_input - own.backward_weight, constants["exposed"] * once)
    if job.framework.gather_overlap:
        gather = exposed(gather, own.forward, constants)
    hidden = hidden_seconds(job, own.forward + own.backward_input + own.backward_weight)
    once = once + np.maximum(constants["data"] * data.apart - hidden, 0.0)
    once = once + agreement_seconds(job)
    once = once + constants["pipeline"] * (data.mirrored + np.abs(data.tied))
    # Muon's matrices are all-gathered one by one, and the step waits for each.
    return once + gather + constants["data"] * data.muon_shards + constants["tensor"] * (data.muon_parts + data.uncut)


def copied_once(data: DataSeconds, microbatches: Number, constants: Constants) -> Number:
    """Seconds of `fully_shard`'s casts, copies and sums once in a step of this many microbatches."""
    return constants["memory"] * (data.copied_once + data.copied_several * (microbatches > 1))


def update_seconds(job: Job, data: DataSeconds, constants: Constants) -> Number:
    """Seconds of the optimizer's own work on such a rank: its reads and writes, and Muon's GEMMs."""
    slower = slowed(job.cluster.chip, {"matmul": 1.0})["matmul"]  # they run by themselves
    device = constants["matmul"] * slower * data.muon_gemms + constants["memory"] * data.muon_passes
    host = host_seconds(job, device, constants["launch"] * data.muon_launches)
    return constants["optimizer"] * data.optimizer + device + host


def exposed_update(job: Job, own: Passes) -> float:
    """Seconds of a step that the device waits for the host, which holds the optimizer state and updates it
    (`train/optimizers/host_adamw.py`), given the passes of a microbatch.

    Gradients leave the device during the backward pass. The update begins when that has ended and goes through the layers in
    forward order, and the next forward pass follows it layer by layer: the slower of the two sets the pace, and the other is late
    by a layer.
    """
    link, many, memory = link_of(job), job.microbatches, job.memory
    moved = host_bytes(job.model, int(job.width), several=many > 1)
    backward = float(own.backward_input + own.backward_weight)
    leaves = max(moved.device / link.to_host, moved.added / link.update) / 1e9
    late = max(many * (leaves - backward), 0.0)
    update = max(moved.updated / link.update, moved.device / link.to_device) / 1e9
    if memory.on_disk:  # moments are read and written
        update = max(update, 2 * moved.moments / link.disk / 1e9)
    forward, layers = float(own.forward), job.model.layers
    return late + max(update + forward / layers, forward + update / layers) - forward


class _Costed(NamedTuple):
    """A job with the seconds of every stage's passes under the constants: all that playing its schedule needs."""

    prepared: Prepared
    constants: Constants
    own: list[Passes]
    """Of each kind of stage, without ZeRO."""
    zero: list[ZeroPasses]
    """Likewise, with ZeRO's traffic."""
    cost: Cost
    hop: float
    blocks: float
    """Seconds of a transfer that the stages themselves wait for."""
    handing: float
    """Seconds in which a microbatch's saved activations go to a partner, or come back."""

    @property
    def wire(self) -> float:
        """Seconds of a transfer that only the receiver waits for."""
        return 0.0 if self.blocks else self.hop


def _costed(prepared: Prepared, constants: Constants | None = None, load: float | None = None) -> _Costed:
    job, kinds = prepared.job, prepared.kinds
    constants = constants_of(job) if constants is None else constants
    each = zip(prepared.stages, prepared.data, strict=True)
    own = [stage_passes(job, stage, data, constants, load) for stage, data in each]
    zero = [with_zero(p, d, constants, job.framework.zero_overlap) for p, d in zip(own, prepared.data, strict=True)]
    hop = constants["pipeline"] * prepared.hop
    blocks = hop if job.framework.pipeline_blocks else 0.0
    forward = [float(zero[k].forward) + blocks for k in kinds]
    inputs = [float(zero[k].backward_input) + blocks for k in kinds]
    weights = [float(zero[k].backward_weight) for k in kinds]
    handing = handing_seconds(job)
    return _Costed(prepared, constants, own, zero, Cost(forward, inputs, weights), hop, blocks, handing)


@lru_cache(maxsize=192)
def waves_of(name: str, ranks: int, microbatches: int, chunks: int) -> Waves:
    """The waves of a schedule, cached: a search plans what it has just played."""
    return Waves(cached_schedule(name, ranks, microbatches, chunks))


def makespans(
    layout: LayoutConfig,
    microbatches: Sequence[int],
    costs: Sequence[Cost],
    wires: Sequence[float],
    handings: Sequence[float] = (),
) -> list[float]:
    """Seconds from the first forward to the last backward pass of a layout's schedule under each of the costs; long schedules are
    played in part and extrapolated. The costs may differ in their microbatches as long as `rounds_to_play` is the same. `handings`
    are seconds in which BPipe's partners hand a microbatch over."""
    if layout.pipeline == 1:
        each = [sum(map(sum, (cost.forward, cost.backward_input, cost.backward_weight))) for cost in costs]
        return [many * one for many, one in zip(microbatches, each, strict=True)]
    name, ranks, chunks = layout.schedule, layout.pipeline, layout.stages_per_rank
    count, fewer = rounds_to_play(ranks * layout.directions, microbatches[0])

    def played(number: int) -> np.ndarray:
        if not any(handings):
            return waves_of(name, ranks, number, chunks).makespans(costs, wires)
        schedule = cached_schedule(name, ranks, number, chunks)
        return np.array([time(schedule, *each).makespan for each in zip(costs, wires, handings, strict=True)])

    def further(more: np.ndarray, few: int) -> np.ndarray:
        passes = [np.sum([c.forward, c.backward_input, c.backward_weight], axis=0) for c in costs]
        return waves_of(name, ranks, count, chunks).further(np.array(passes).T, more, few)

    if layout.asynchronous:  # steps overlap: a step takes what its microbatches add to a long schedule
        return (further(played(4 * ranks) - played(3 * ranks), ranks) * np.array(microbatches)).tolist()
    spans = played(count)
    if fewer:
        spans += further(spans - played(count - fewer), fewer) * (np.array(microbatches) - count)
    return spans.tolist()


def step_time(
    prepared: Prepared, constants: Constants | None = None, play_one: Callable[[Job, Cost, float], float] | None = None
) -> Step:
    """The step of one layout. `play_one`, if given, replaces playing the schedule."""
    one, job = _costed(prepared, constants), prepared.job
    if play_one is not None:
        return _combined(one, play_one(job, one.cost, one.wire))
    return _combined(one, *makespans(job.layout, [job.microbatches], [one.cost], [one.wire], [one.handing]))


def step_times(many: Sequence[Prepared]) -> list[Step]:
    """The steps of many layouts; those of one schedule are played together."""
    every = [_costed(prepared) for prepared in many]
    alike: dict[tuple[str, int, int, int, int], list[_Costed]] = {}
    for one in every:
        job = one.prepared.job
        rounds = rounds_to_play(job.layout.pipeline * job.layout.directions, job.microbatches)
        key = (job.layout.schedule, job.layout.pipeline, job.layout.stages_per_rank, *rounds)
        alike.setdefault(key, []).append(one)
    steps: dict[int, Step] = {}
    for ours in alike.values():
        jobs = [one.prepared.job for one in ours]
        counts = [job.microbatches for job in jobs]
        wires, handings = [one.wire for one in ours], [one.handing for one in ours]
        spans = makespans(jobs[0].layout, counts, [one.cost for one in ours], wires, handings)
        steps |= {id(one): _combined(one, makespan) for one, makespan in zip(ours, spans, strict=True)}
    return [steps[id(one)] for one in every]


@dataclass(frozen=True)
class Step:
    """One step and its parts."""

    seconds: float
    breakdown: dict[str, float]
    cost: Cost
    """Seconds of a microbatch's passes on each stage."""
    placement: tuple[int, ...]
    """The pipeline rank of each stage."""
    hop: float
    slowest: int
    """The pipeline rank with the most work."""
    tail: float
    optimizer: float
    handing: float = 0.0
    """Seconds in which a microbatch's saved activations go to a partner, or come back."""


def _combined(one: _Costed, makespan: float) -> Step:
    """The step whose schedule takes `makespan` seconds."""
    prepared, constants, own, _, cost, hop, blocks, handing = one
    job, kinds = prepared.job, prepared.kinds
    lay, microbatches = job.layout, job.stage_microbatches
    placement = lay.placement
    busy, tails, parts, aparts, mirrors, updates, copies = [], [], [], [], [], [], []
    stages = [[n for n, home in enumerate(placement) if home == rank] for rank in range(lay.pipeline)]
    for mine in stages:
        each = (cost.forward[n] + cost.backward_input[n] + cost.backward_weight[n] for n in mine)
        busy.append(microbatches * sum(each))
        data = DataSeconds(*map(sum, zip(*(prepared.data[kinds[n]] for n in mine), strict=True)))
        ours = [own[kinds[n]] for n in mine]
        forward, inputs = sum(p.forward for p in ours), sum(p.backward_input for p in ours)
        work = Passes(forward, inputs, sum(p.backward_weight for p in ours), {})
        tails.append(float(tail_seconds(job, work, data, constants)))
        parts.append(constants["tensor"] * float(data.muon_parts + data.uncut))
        mirrors.append(constants["pipeline"] * float(data.mirrored + np.abs(data.tied)))
        aparts.append(tails[-1] - float(tail_seconds(job, work, data._replace(apart=0.0), constants)))
        updates.append(float(update_seconds(job, data, constants)))
        copies.append(float(copied_once(data, microbatches, constants)))
    tail, optimizer = max(tails), exposed_update(job, own[0]) if job.memory.hosts_optimizer else max(updates)
    tensor_tail, replicas_tail, mirror_tail = (each[int(np.argmax(tails))] for each in (parts, aparts, mirrors))
    ahead = job.forward_passes * _forward_seconds(cost, placement, microbatches, lay)
    whole = makespan + ahead + tail + optimizer + max(copies) + constants["overhead"]
    seconds = whole * float(slowdown(job, constants))

    slowest = int(np.argmax(busy))
    breakdown = _parts(one, stages[slowest])
    # A frozen network's forward passes are made of the same operations as the others.
    share = ahead / (sum(breakdown.values()) or 1.0)
    breakdown = {name: value * (1.0 + share) for name, value in breakdown.items()}
    breakdown["pipeline"] = 2.0 * blocks * microbatches * len(stages[slowest]) + mirror_tail
    breakdown["bubble"] = makespan - busy[slowest]
    breakdown["shard" if float(job.zero_ranks) > 1 else "replicate"] += tail - tensor_tail - replicas_tail - mirror_tail
    breakdown["replicate"] += replicas_tail
    breakdown["tensor"] += tensor_tail
    breakdown["memory"] += max(copies)
    breakdown["optimizer"] = optimizer
    breakdown["other"] = constants["overhead"] + seconds - whole
    return Step(seconds, breakdown, cost, placement, hop, slowest, tail, optimizer, handing)


def _forward_seconds(cost: Cost, placement: tuple[int, ...], microbatches: int, lay: LayoutConfig) -> float:
    """Seconds of forward passes alone, one microbatch after another: the pipeline fills, then its busiest rank sets the pace."""
    each = (sum(f for f, home in zip(cost.forward, placement, strict=True) if home == r) for r in range(lay.pipeline))
    return sum(cost.forward) / lay.directions + (microbatches - 1) * max(each)


def _parts(one: _Costed, stages: Sequence[int]) -> dict[str, float]:
    """Seconds by category of the passes over some stages, with all microbatches of a step."""
    names = ("matmul", "attention", "memory", "host", "replicate", "shard", "context", "tensor", "expert", "offload")
    found, microbatches = dict.fromkeys(names, 0.0), one.prepared.job.stage_microbatches
    for n in stages:
        kind = one.prepared.kinds[n]
        for name, value in one.own[kind].parts.items():
            found[name] += microbatches * float(value)
        found["shard"] += microbatches * float(one.zero[kind].exposed)
        found["memory"] += microbatches * float(one.zero[kind].copied)
    return found


class RankTime(NamedTuple):
    """The work of one pipeline rank in a step, without its waiting."""

    parts: dict[str, float]
    """Seconds by category, including exposed traffic and the optimizer."""
    launches: float
    """Kernels of all passes."""


def rank_time(job: Job, pipeline_rank: int, load: float | None = None) -> RankTime:
    """The work of one pipeline rank of a job; `load` is the share of a step in which it computes, if that was measured."""
    one = _costed(prepare(job), load=load)
    prepared = one.prepared
    mine = [n for n, home in enumerate(job.layout.placement) if home == pipeline_rank]
    data = DataSeconds(*map(sum, zip(*(prepared.data[prepared.kinds[n]] for n in mine), strict=True)))
    parts = _parts(one, mine) | {"optimizer": float(update_seconds(job, data, one.constants))}
    parts["memory"] += float(copied_once(data, job.stage_microbatches, one.constants))
    each = (prepared.stages[prepared.kinds[n]].launches for n in mine)
    return RankTime(parts, job.stage_microbatches * float(sum(sum(passes) for passes in each)))
