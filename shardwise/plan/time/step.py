"""The time of one step: the schedule's own action list played with the seconds of each stage, ZeRO's and the copies' traffic
beside it, the optimizer and what is left.

`prepare` asks the hardware how long everything takes; `step_time` puts that together under the fitted constants. Large
pipelines repeat themselves: beyond some microbatches each further one adds the same time, so a list of a few rounds is
played and the rest is that slope, which changes nothing but the waiting for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardwise.hardware import Operation, collective_seconds, memory_seconds
from shardwise.plan.cost.constants import Constants, constants_of
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.ops import span
from shardwise.plan.cost.parameters import LocalNumel, stage_parameters, zero_groups
from shardwise.plan.cost.passes import Passes, Piece, Pieces, host_seconds, passes
from shardwise.plan.cost.stages import stage_counts
from shardwise.plan.time.waves import Waves
from shardwise.plan.trainer.muon import seconds as muon_seconds
from shardwise.schedules import Cost, Timing, time
from shardwise.schedules.rounds import cached_schedule, fewer_rounds

Number = Any
OPTIMIZER_BYTES = 40.0
"""Read and written for each parameter by AdamW: gradient, master copy and moments in float32, the norm's pass over the
gradients, their zeroing, and the parameter written in 16 bits."""


class DataSeconds(NamedTuple):
    """Traffic of data parallelism and the optimizer for the parameters of one stage, before the constants."""

    forward: Number
    """In every microbatch: ZeRO-3's gathers."""
    backward: Number
    """Likewise, with the gradients' scattering where that is done every microbatch."""
    once: Number
    """Once a step: gradients."""
    gather_once: Number
    """Once a step: updated parameters."""
    optimizer: Number
    """Reading and writing what it holds."""
    muon_products: Number = 0.0
    muon_passes: Number = 0.0
    muon_launches: Number = 0.0
    muon_shards: Number = 0.0
    muon_parts: Number = 0.0
    """Of Muon, as `Orthogonalised` has them."""


def layers_by_stage(job: Job) -> list[tuple[int, int]]:
    """Dense and routed layers of each stage."""
    m = job.model
    result, start = [], 0
    for count in stage_counts(m, job.layout, job.seq_len):
        dense = count if not m.experts else max(0, min(m.dense_layers - start, count))
        result.append((dense, count - dense))
        start += count
    return result


def data_seconds(job: Job, held: LocalNumel, layers: tuple[Number, Number]) -> DataSeconds:
    """What sharing and copying the parameters of a stage, of so many dense and routed layers, costs in traffic, before anything
    hides it; and what updating them takes."""
    lay, stack, cluster = job.layout, job.stack, job.cluster
    zero, expert_zero = zero_groups(job)
    copies, copies_stride = span(job, "replicate")

    def over(operation: Operation, width: float) -> Number:
        """Seconds of a collective over the ranks that share, dense and expert parameters."""
        seconds = collective_seconds(cluster, operation, held.dense * width, zero, lay.tensor)
        if job.model.experts:
            stride = lay.tensor * lay.expert
            seconds = seconds + collective_seconds(cluster, operation, held.experts * width, expert_zero, stride)
        return seconds

    own = held.dense / zero + held.experts / expert_zero
    among_copies = collective_seconds(cluster, "all_reduce", own * stack.reduce_bytes, copies, copies_stride)
    gather, scatter = over("all_gather", stack.gather_bytes), over("reduce_scatter", stack.reduce_bytes)
    update = memory_seconds(cluster.chip, own * OPTIMIZER_BYTES), *muon_seconds(job, *layers)
    often = stack.reduce_every_microbatch
    every = scatter if often and lay.zero >= 2 else 0.0 * scatter
    if lay.zero == 3:
        return DataSeconds(gather, gather + every, among_copies + scatter - every, 0.0 * gather, *update)
    return DataSeconds(0.0 * gather, every, among_copies + scatter - every, gather, *update)


@dataclass(frozen=True)
class Prepared:
    """A job with every time that only the hardware decides."""

    job: Job
    layers: list[tuple[int, int]]
    held: list[LocalNumel]
    kinds: list[int]
    """Which of the different stages below each stage is."""
    pieces: list[Piece]
    data: list[DataSeconds]
    hop: float


def prepare(job: Job) -> Prepared:
    """Ask the hardware. Stages that are alike are asked for once."""
    layers = layers_by_stage(job)
    held = stage_parameters(job, layers)  # type: ignore[arg-type]
    network = Pieces.of(job)
    last = len(layers) - 1
    seen: dict[tuple[int, int, bool, bool], int] = {}
    kinds: list[int] = []
    pieces: list[Piece] = []
    data: list[DataSeconds] = []
    for n, (dense, routed) in enumerate(layers):
        key = (dense, routed, n == 0, n == last)
        if key not in seen:
            seen[key] = len(pieces)
            pieces.append(network.stage(dense, routed, first=float(n == 0), last=float(n == last)))
            data.append(data_seconds(job, held[n], (dense, routed)))
        kinds.append(seen[key])
    hop = 0.0
    if job.layout.pipeline > 1:
        ranks = job.layout.tensor if job.stack.pipeline_pieces else 1
        size = job.rows / ranks * job.model.hidden * job.width
        hop = float(collective_seconds(job.cluster, "send", size, *span(job, "pipeline")))
    return Prepared(job, layers, held, kinds, pieces, data, hop)


class Sharing(NamedTuple):
    """The passes of a stage with ZeRO's traffic beside them, and how much of it they do not hide."""

    forward: Number
    backward_input: Number
    backward_weight: Number
    exposed: Number


def with_sharing(own: Passes, data: DataSeconds, constants: Constants) -> Sharing:
    """Lay ZeRO's traffic beside the passes."""

    def beside(work: Number, traffic: Number) -> Number:
        traffic = constants["data"] * traffic
        hidden = np.minimum(work, traffic)
        return np.maximum(traffic - work, 0.0) + constants["contention"] * hidden

    ahead = beside(own.forward, data.forward)
    behind = beside(own.backward_input + own.backward_weight, data.backward)
    return Sharing(own.forward + ahead, own.backward_input + behind, own.backward_weight, ahead + behind)


def slowdown(job: Job, constants: Constants) -> Number:
    """How much longer a step takes where many machines wait for the slowest."""
    machines = np.maximum(job.layout.world / job.cluster.per_node, 1.0)
    return 1.0 + constants["jitter"] * np.log2(machines)


@lru_cache(maxsize=64)
def _waves(name: str, ranks: int, microbatches: int, chunks: int) -> Waves:
    """The waves of a schedule, remembered: a search plans what it has just played."""
    return Waves(cached_schedule(name, ranks, microbatches, chunks))


@lru_cache(maxsize=64)
def _timed(
    name: str, ranks: int, microbatches: int, chunks: int, costs: tuple[tuple[float, ...], ...], wire: float
) -> Timing:
    """A schedule played, remembered: a plan's timeline is that of its step."""
    return time(cached_schedule(name, ranks, microbatches, chunks), Cost(*costs), wire)


def played(job: Job, microbatches: int) -> tuple[int, int]:
    """Microbatches to play, and how many fewer a second time, to know the slope; all of them when they are few."""
    ranks = job.layout.pipeline
    most = fewer_rounds(ranks, microbatches, 3)
    return (microbatches, 0) if microbatches <= most + ranks else (most, ranks)


@dataclass(frozen=True)
class Step:
    """One step, taken apart."""

    seconds: float
    breakdown: dict[str, float]
    cost: Cost
    """Of a microbatch's passes on each stage."""
    placement: tuple[int, ...]
    makespan: float
    hop: float
    slowest: int
    """The pipeline rank with the most work."""
    tail: float
    optimizer: float
    timing: Timing | None = None
    parts: list[dict[str, float]] = field(default_factory=list)


Played = tuple[float, tuple[int, ...], Timing | None]
"""From the first forward to the last backward; where the stages stand; when everything happens."""


class Costed(NamedTuple):
    """A job with the seconds of every stage's passes under the constants: all that playing its schedule needs."""

    prepared: Prepared
    constants: Constants
    own: list[Passes]
    """Of each kind of stage, alone."""
    shared: list[Sharing]
    """Likewise, with ZeRO's traffic."""
    cost: Cost
    hop: float
    blocks: float
    """Of a transfer, what the stages themselves wait for."""
    microbatches: int

    @property
    def wire(self) -> float:
        """Of a transfer, what only the receiver waits for."""
        return 0.0 if self.blocks else self.hop


def costed(prepared: Prepared, constants: Constants | None = None) -> Costed:
    """How long the passes of each stage take."""
    job, kinds = prepared.job, prepared.kinds
    constants = constants_of(job) if constants is None else constants
    own = [passes(job, piece, constants) for piece in prepared.pieces]
    shared = [with_sharing(p, d, constants) for p, d in zip(own, prepared.data, strict=True)]
    hop = constants["pipeline"] * prepared.hop
    blocks = hop if job.stack.pipeline_blocks else 0.0
    forward = [float(shared[k].forward) + blocks for k in kinds]
    inputs = [float(shared[k].backward_input) + blocks for k in kinds]
    weights = [float(shared[k].backward_weight) for k in kinds]
    microbatches = max(1, round(float(job.accumulation)))
    return Costed(prepared, constants, own, shared, Cost(forward, inputs, weights), hop, blocks, microbatches)


def step_time(
    prepared: Prepared,
    constants: Constants | None = None,
    play: Callable[[Job, Cost, float, int], Played] | None = None,
) -> Step:
    """The step of one layout. `play` may stand in for playing the schedule."""
    one = costed(prepared, constants)
    return put_together(one, (play or play_schedule)(prepared.job, one.cost, one.wire, one.microbatches))


def step_times(many: Sequence[Prepared]) -> list[Step]:
    """The steps of many layouts; those of one schedule are played together."""
    every = [costed(prepared) for prepared in many]
    alike: dict[tuple[str, int, int, int, int], list[int]] = {}
    for n, one in enumerate(every):
        lay = one.prepared.job.layout
        count, fewer = played(one.prepared.job, one.microbatches)
        alike.setdefault((lay.schedule, lay.pipeline, lay.stages_per_rank, count, fewer), []).append(n)
    steps: dict[int, Step] = {}
    for (name, ranks, chunks, count, fewer), members in alike.items():
        ours = [every[n] for n in members]
        for n, result in zip(members, _play_alike(name, ranks, chunks, count, fewer, ours), strict=True):
            steps[n] = put_together(every[n], result)
    return [steps[n] for n in range(len(every))]


def _play_alike(name: str, ranks: int, chunks: int, count: int, fewer: int, ours: list[Costed]) -> list[Played]:
    if ranks == 1:
        return [play_schedule(one.prepared.job, one.cost, one.wire, one.microbatches) for one in ours]
    costs, wires = [one.cost for one in ours], [one.wire for one in ours]
    schedule = cached_schedule(name, ranks, count, chunks)
    spans = _waves(name, ranks, count, chunks).makespans(costs, wires)
    if fewer:
        before = _waves(name, ranks, count - fewer, chunks).makespans(costs, wires)
        spans += (spans - before) / fewer * ([one.microbatches - count for one in ours])
    return [(float(span), schedule.placement, None) for span in spans]


def put_together(one: Costed, result: Played) -> Step:
    """The step whose schedule was played with this result."""
    prepared, constants, own, shared, cost, hop, blocks, microbatches = one
    makespan, placement, timing = result
    job, kinds = prepared.job, prepared.kinds
    lay = job.layout
    forward, inputs, weights = cost.forward, cost.backward_input, cost.backward_weight

    busy = [0.0] * lay.pipeline
    tails, parts, updates = [0.0] * lay.pipeline, [0.0] * lay.pipeline, [0.0] * lay.pipeline
    for rank in range(lay.pipeline):
        mine = [n for n, home in enumerate(placement) if home == rank]
        busy[rank] = microbatches * sum(forward[n] + inputs[n] + weights[n] for n in mine)
        data = DataSeconds(*map(sum, zip(*(prepared.data[kinds[n]] for n in mine), strict=True)))
        ours = [own[kinds[n]] for n in mine]
        rank_passes = Passes(
            sum(p.forward for p in ours), sum(p.backward_input for p in ours), sum(p.backward_weight for p in ours), {}
        )
        tails[rank] = float(tail_seconds(job, rank_passes, data, constants))
        parts[rank] = constants["tensor"] * float(data.muon_parts)
        updates[rank] = float(update_seconds(job, data, constants))
    tail, optimizer = max(tails), max(updates)
    joined = parts[int(np.argmax(tails))]
    whole = makespan + tail + optimizer + constants["overhead"]
    seconds = whole * float(slowdown(job, constants))

    slowest = int(np.argmax(busy))
    mine = [n for n, home in enumerate(placement) if home == slowest]
    breakdown = dict.fromkeys(
        ("matmul", "attention", "memory", "host", "replicate", "shard", "context", "tensor", "expert"), 0.0
    )
    for n in mine:
        for name, value in own[kinds[n]].parts.items():
            breakdown[name] += microbatches * float(value)
        breakdown["shard"] += microbatches * float(shared[kinds[n]].exposed)
    breakdown["pipeline"] = 2.0 * blocks * microbatches * len(mine)
    breakdown["bubble"] = makespan - busy[slowest]
    breakdown["shard" if float(job.zero_ranks) > 1 else "replicate"] += tail - joined
    breakdown["tensor"] += joined
    breakdown["optimizer"] = optimizer
    breakdown["other"] = constants["overhead"] + seconds - whole
    return Step(seconds, breakdown, cost, placement, makespan, hop, slowest, tail, optimizer, timing)


def play_schedule(job: Job, cost: Cost, wire: float, microbatches: int) -> Played:
    """Play the job's schedule, or enough of it, with these costs."""
    lay = job.layout
    if lay.pipeline == 1:
        one = sum(map(sum, (cost.forward, cost.backward_input, cost.backward_weight)))
        return microbatches * one, (0,) * len(cost.forward), None
    count, fewer = played(job, microbatches)
    schedule = cached_schedule(lay.schedule, lay.pipeline, count, lay.stages_per_rank)
    costs = (tuple(cost.forward), tuple(cost.backward_input), tuple(cost.backward_weight))
    timing = _timed(lay.schedule, lay.pipeline, count, lay.stages_per_rank, costs, wire)
    makespan = timing.makespan
    if fewer:
        before = _timed(lay.schedule, lay.pipeline, count - fewer, lay.stages_per_rank, costs, wire)
        makespan += (makespan - before.makespan) / fewer * (microbatches - count)
    return makespan, schedule.placement, timing


def tail_seconds(job: Job, own: Passes, data: DataSeconds, constants: Constants) -> Number:
    """Traffic once a step that nothing hides, on a rank whose stages take and send so much together."""
    once, gather = constants["data"] * data.once, constants["data"] * data.gather_once
    share = constants["exposed"]
    if job.stack.gradients_overlap:
        once = np.maximum(once - own.backward_input - own.backward_weight, share * once)
    if job.stack.gather_overlap:
        gather = np.maximum(gather - own.forward, share * gather)
    # Muon's matrices are brought together one by one, and each is waited for.
    return once + gather + constants["data"] * data.muon_shards + constants["tensor"] * data.muon_parts


def update_seconds(job: Job, data: DataSeconds, constants: Constants) -> Number:
    """The optimizer's own work on such a rank: what it reads and writes, and Muon's products."""
    device = constants["matmul"] * data.muon_products + constants["memory"] * data.muon_passes
    host = host_seconds(job, device, constants["launch"] * data.muon_launches)
    return constants["optimizer"] * data.optimizer + device + host
