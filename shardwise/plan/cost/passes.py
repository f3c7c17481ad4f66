"""Seconds of the passes over one stage: forward, recomputation, backward for the inputs and for the weights.

The ops of `operations.py` are added up by category, scaled by the fitted constants, and combined the way a device's streams run.
Traffic that the framework can overlap hides behind the work beside it, and the rest is exposed. A device that finishes its kernels
before the host has launched the next ones waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardwise.hardware.power import power_of, slowed
from shardwise.plan.cost.constants import Constants
from shardwise.plan.cost.job import GIB, Job, Number
from shardwise.plan.cost.operations import embedding, head, layer, residual_bytes
from shardwise.plan.cost.ops import FORWARD, INPUT, WEIGHT, Op, OpList
from shardwise.plan.cost.parameters import cast_copies, layer_parameters
from shardwise.plan.cost.rematerialization import exposed_swap, is_routed, shares
from shardwise.run.derive import compiled_as_one

CATEGORIES = ("matmul", "attention", "memory", "tensor", "context", "expert", "offload")
COLUMNS = (*CATEGORIES, "hot")
"""Those of a module's seconds. `hot` are the seconds of `matmul` in GEMMs that draw more power (`hardware/power.py`)."""
HOT = COLUMNS.index("hot")
FORWARDS, RECOMPUTE, INPUTS, WEIGHTS = range(4)
SHARPNESS = 4.0
"""How sharply a pass changes from device-bound to host-bound; on a CPU the host is the device, and the two add up."""


def recomputed_share(job: Job, op: Op) -> Number:
    """The share of this op that the backward pass recomputes, in a layer that is recomputed."""
    lay, framework = job.layout, job.framework
    if lay.recompute in ("full", "budget"):
        if not op.early_stop or not framework.early_stop:
            return 1.0
        own = framework.family == "shardwise" and framework.kernels == "compiled"
        return 1.0 - compiled_as_one(job.model, lay) if own else 0.0
    if lay.recompute == "attention":
        if op.core:
            return float("attention" in framework.recompute_selective)
        if op.category == "matmul" and op.name not in framework.recompute_selective:
            return framework.recompute_gemms
        return float(not {op.name, f"{op.part} {op.name}"}.isdisjoint(framework.recompute_selective))
    return float(lay.recompute == "operations" and op.part in lay.recompute_operations)


def recomputed_shares(job: Job, ops: OpList) -> list[Number]:
    """The recomputed share of each op of a layer; where single tensors are rematerialized, the mean over layers."""
    if job.layout.recompute != "optimal" or not any(op.name == "out" for op in ops):
        return [recomputed_share(job, op) for op in ops]
    return shares(job, ops, float(_saved(job, ops)))


def _saved(job: Job, ops: OpList) -> Number:
    """Bytes that a layer saves where nothing is recomputed, including the cast copies of its weights."""
    cast = cast_copies(job, layer_parameters(job, routed=is_routed(ops)))
    return sum(op.saved for op in ops) + cast


LEAST_SPARED = 1e-6
"""Fewest bytes that recomputing a layer counts as freeing, so that an exceeded budget recomputes all layers where it frees none."""


def recomputed_layers(job: Job, ops: OpList) -> Number:
    """The share of a rank's layers that is recomputed, as if all were like this one. A budget recomputes whole layers."""
    lay = job.layout
    if lay.recompute != "budget":
        return 1.0 / lay.recompute_every
    saved = _saved(job, ops)
    spared = np.maximum(saved - residual_bytes(job), LEAST_SPARED)
    layers = job.rank_layers
    over = np.ceil((layers * saved - lay.recompute_budget * GIB) / spared - 1e-9)
    return np.clip(over / layers, 0.0, 1.0)


@dataclass(frozen=True)
class ModuleCost:
    """Seconds by pass and category before the constants, and kernels launched by pass, of one module or stage."""

    seconds: list[list[Number]]
    launches: list[Number]

    @classmethod
    def of(cls, ops: OpList, *, recomputes: bool = True) -> ModuleCost:
        """The sum of a module's ops; `recomputes`: whether the module may be recomputed."""
        seconds: list[list[Number]] = [[0.0] * len(COLUMNS) for _ in range(4)]
        launches: list[Number] = [0.0] * 4
        job = ops.job
        layers = recomputed_layers(job, ops)
        for op, again in zip(ops, recomputed_shares(job, ops), strict=True):
            columns = [COLUMNS.index(op.category), *[HOT] * op.hot]
            for to, source in ((FORWARDS, FORWARD), (INPUTS, INPUT), (WEIGHTS, WEIGHT)):
                for column in columns:
                    seconds[to][column] = seconds[to][column] + op.seconds[source]
                launches[to] = launches[to] + op.launches[source]
            share = layers * again if recomputes else 0.0
            if np.any(share):
                for column in columns:
                    seconds[RECOMPUTE][column] = seconds[RECOMPUTE][column] + share * op.seconds[FORWARD]
                launches[RECOMPUTE] = launches[RECOMPUTE] + share * op.launches[FORWARD]
        if recomputes and job.memory.swaps:
            for to, late in zip((FORWARDS, RECOMPUTE), exposed_swap(job, ops, float(_saved(job, ops))), strict=True):
                seconds[to][CATEGORIES.index("offload")] += late
        if recomputes and job.layout.recompute in ("full", "budget"):
            launches[RECOMPUTE] = launches[RECOMPUTE] + layers * job.framework.checkpoint_host
        return cls(seconds, launches)


@dataclass(frozen=True)
class NetworkCost:
    """The four modules a network is made of, for one microbatch. `dense` or `moe` is None where there is no such layer."""

    embedding: ModuleCost
    dense: ModuleCost | None
    moe: ModuleCost | None
    head: ModuleCost

    @classmethod
    def of(cls, job: Job) -> NetworkCost:
        """The modules of a job."""
        return cls.of_ranks(job, (0,))[0]

    @classmethod
    def of_ranks(cls, job: Job, layers: Iterable[int]) -> dict[int, NetworkCost]:
        """The modules of a job by the number of layers of a rank: with a budget this decides how many layers are recomputed."""
        dense = layer(job, routed=False) if not job.model.experts or job.model.dense_layers else None
        ops = embedding(job), dense, layer(job, routed=True) if job.model.experts else None, head(job)
        return {count: cls.added(replace(job, layers_of_rank=count), *ops) for count in dict.fromkeys(layers)}

    @classmethod
    def added(cls, job: Job, embedding: OpList, dense: OpList | None, moe: OpList | None, head: OpList) -> NetworkCost:
        """The modules from their ops, which are the same for every recompute mode."""
        first, last = (ModuleCost.of(ops, recomputes=False) for ops in (embedding, head))
        layers = [None if ops is None else ModuleCost.of(OpList(job, ops)) for ops in (dense, moe)]
        return cls(first, layers[0], layers[1], last)

    def stage(self, dense: Number, moe: Number, *, first: Number, last: Number) -> ModuleCost:
        """A stage of this many dense and MoE layers, with the embedding and the head where it has them."""
        parts = ((first, self.embedding), (dense, self.dense), (last, self.head), (moe, self.moe))
        seconds: list[list[Number]] = [[0.0] * len(COLUMNS) for _ in range(4)]
        launches: list[Number] = [0.0] * 4
        for times, module in parts:
            if module is not None:
                for row, own in zip(seconds, module.seconds, strict=True):
                    row[:] = [a + times * b for a, b in zip(row, own, strict=True)]
                launches = [a + times * b for a, b in zip(launches, module.launches, strict=True)]
        return ModuleCost(seconds, launches)


@dataclass(frozen=True)
class Passes:
    """Seconds that a stage's passes really take, in all and by category."""

    forward: Number
    backward_input: Number
    """Including the recomputation before it."""
    backward_weight: Number
    parts: dict[str, Number]
    """All passes together, by category of the ledger."""


class Beside(NamedTuple):
    """What a device does for the parameters of a stage beside a microbatch's passes, in seconds."""

    copies: Number = 0.0
    """Casts, copies and sums."""
    traffic: Number = 0.0
    """Traffic, of which some hides under the passes."""


NOTHING = Beside()
WORK = ("matmul", "attention", "memory")
"""Categories in which the device computes. In the others it waits for traffic, which draws as much power as passes over memory: so
the errors of published rows are least whose sources were left out. It rests where it waits for the host."""


def passes(
    job: Job, stage: ModuleCost, constants: Constants, beside: Beside = NOTHING, load: float | None = None
) -> Passes:
    """The passes of a stage, with exposed traffic and the host's share, but without ZeRO's traffic and the pipeline's. `load` is
    the share of the time in which the device computes, if that was measured without traffic; else it follows from the host. The
    higher it is, the lower is the device's clock."""
    return passes_at_one_clock(job, [(1.0, stage)], constants, beside, load)[0]


def passes_at_one_clock(
    job: Job,
    modules: Sequence[tuple[Number, ModuleCost]],
    constants: Constants,
    beside: Beside = NOTHING,
    load: float | None = None,
) -> list[Passes]:
    """The passes of each of these modules, of which there are so many, at the clock of them all."""
    chip = job.cluster.chip
    found = [_passes(job, module, constants, {}) for _, module in modules]
    if power_of(chip) is None:
        return found
    counts = [count for count, _ in modules]
    parts = {n: sum(c * own.parts[n] for c, own in zip(counts, found, strict=True)) for n in found[0].parts}
    work = {name: parts[name] for name in WORK}
    hot = sum(c * sum(row[HOT] for row in module.seconds) for c, module in modules)
    work["hot"] = np.minimum(hot * constants.get("matmul", 1.0), work["matmul"])
    work["matmul"] = work["matmul"] - work["hot"]
    work["memory"] = work["memory"] + beside.copies
    if load is None:  # waiting for traffic is no rest: its kernels copy
        late = np.maximum(beside.traffic - sum(work.values()), 0.0)
        work["memory"] = work["memory"] + late + sum(parts[name] for name in CATEGORIES if name not in WORK)
    slower = slowed(chip, work, parts["host"], load)
    return [_passes(job, module, constants, slower) for _, module in modules]


def _passes(job: Job, stage: ModuleCost, constants: Constants, slower: Mapping[str, Number]) -> Passes:
    """The same, where work of each category takes so many times as long as its curves say."""
    framework = job.framework
    parts: dict[str, Number] = dict.fromkeys((*CATEGORIES, "host"), 0.0)
    launch = constants["launch"] * framework.host * (1.0 - framework.graphed)
    devices, launches = [], [count * launch for count in stage.launches]
    factors = [constants.get(name, 1.0) * slower.get(name, 1.0) for name in CATEGORIES]
    hotter = constants.get("matmul", 1.0) * (slower.get("hot", 1.0) - slower.get("matmul", 1.0))
    for *row, hot in stage.seconds:
        own = {name: value * factor for name, value, factor in zip(CATEGORIES, row, factors, strict=True)}
        own["matmul"] = own["matmul"] + hotter * hot
        own["tensor"] = own["tensor"] - np.minimum(framework.tensor_overlap * own["tensor"], own["matmul"])
        if job.layout.context_method == "ring":
            own["context"] = exposed(own["context"], own["attention"], constants)
        own["expert"] = own["expert"] * (1.0 - framework.expert_overlap)
        for name, value in own.items():
            parts[name] = parts[name] + value
        devices.append(sum(own.values()))
    # Where the host is slower the device waits, and a little where the two are close. Passes that would wait as a whole
    # are replayed as a CUDA graph.
    launched = np.where(sum(launches) < sum(devices), 1.0, 0.0) if framework.replays else 1.0
    results = []
    for device, launch in zip(devices, launches, strict=True):
        host = launched * host_seconds(job, device, launch)
        parts["host"] = parts["host"] + host
        results.append(device + host)
    forward, recompute, inputs, weights = results
    return Passes(forward, recompute + inputs, weights, parts)


def host_seconds(job: Job, device: Number, launch: Number) -> Number:
    """Seconds that work on the device waits for its launches."""
    power = 1.0 if job.cluster.chip.name == "cpu" else SHARPNESS
    return (device**power + launch**power) ** (1 / power) - device


def exposed(traffic: Number, work: Number, constants: Constants) -> Number:
    """Seconds of traffic that stay exposed where it can overlap with work."""
    return np.maximum(traffic - work, constants["exposed"] * traffic)
