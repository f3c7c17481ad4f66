"""A run's plan: does it fit, how fast is it, where does the time go, what does it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardwise.ledger import Account, Memory, as_dict
from shardwise.plan.cost.constants import fitted, groups_of
from shardwise.plan.cost.flops import CONVENTION, parameters, training_flops
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.cost.layer_memory import layer_activations
from shardwise.plan.cost.memory import GIB, memory
from shardwise.plan.cost.operations import embedding, head, layer
from shardwise.plan.published.prediction import interval
from shardwise.plan.time.goodput import JobCost, data_stall, job_cost
from shardwise.plan.time.step import Step, layers_by_stage, prepare, step_time
from shardwise.plan.trainer import muon, state
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.traffic import first_ranks, traffic
from shardwise.plan.trainer.work import work
from shardwise.run import AXES, LayoutConfig, Run
from shardwise.run.derive import chunks_loss, compiles, planned_on_gpu

SHOWN = (
    *AXES,
    "zero",
    "schedule",
    "chunks",
    "recompute",
    "recompute_budget",
    "context_method",
    "async_tensor",
    "expert_tensor",
    "offload",
)
"""The keys of a layout that a ranking shows, where they are not the usual."""


@dataclass(frozen=True)
class Plan:
    """What to expect of a run."""

    run: Run
    job: Job
    account: Account
    low: float
    high: float
    """Between these the step's seconds lie in 8 of 10 cases."""
    mfu: float
    cost: JobCost
    binds: str
    """What limits it."""
    notes: tuple[str, ...]
    step: Step

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return self.account.memory.fits

    def as_dict(self) -> dict[str, Any]:
        """For programs; names are stable."""
        account = self.account
        return {
            "layout": layout_dict(self.run.layout) | {"microbatch": self.run.train.microbatch},
            "devices": self.run.layout.world,
            "fits": self.fits,
            "step_seconds": account.step_seconds,
            "step_seconds_low": self.low,
            "step_seconds_high": self.high,
            "tokens_per_s": account.tokens_per_second,
            "mfu": self.mfu,
            "peak_flops": told_by(self.job)[1],
            "flops": as_dict(account.work.flops),
            "bytes_moved": as_dict(account.work.bytes),
            "flops_convention": CONVENTION,
            "memory": {
                "capacity": account.memory.capacity,
                "peak": account.memory.peak,
                "stages": as_dict(account.memory.ranks),
            },
            "traffic": as_dict(account.traffic.bytes),
            "breakdown": dict(account.breakdown),
            "cost": as_dict(self.cost),
            "binds": self.binds,
            "notes": list(self.notes),
        }


def layout_dict(layout: LayoutConfig) -> dict[str, Any]:
    """A layout's keys and values, axes first."""
    return {name: getattr(layout, name) for name in SHOWN}


def plan(run: Run) -> Plan:
    """The plan of a run whose layout is given."""
    return plan_job(run, job_of(run))


def plan_job(
    run: Run, job: Job, step: Step | None = None, space: Memory | None = None, *, precise: bool = True
) -> Plan:
    """The plan of a run as this job, whose step and memory may be known already; `precise` looks at every pipeline rank for the
    most traffic, which takes a few times longer."""
    step, space = step or step_time(prepare(job)), space or memory_of(run, job)
    stall = data_stall(run, job.cluster, step.seconds)
    step = replace(step, seconds=step.seconds + stall, breakdown={**step.breakdown, "data": stall})
    wire = traffic(run, None if precise else 0)
    done = replace(work(run), bytes=bytes_moved(job, step))
    account = Account("plan", step.seconds, job.tokens, step.breakdown, done, space, wire)
    devices = run.layout.world
    mfu = job.tokens * training_flops(job.model, job.seq_len) / (step.seconds * devices * told_by(job)[1])
    checkpoint = parameters(job.model).total * 12.0
    cost = job_cost(run, job.cluster, step.seconds, devices, checkpoint)
    notes = notes_of(job)
    width = interval("training" if known_chip(job) else "unseen_chip")
    return Plan(
        run, job, account, step.seconds * math.exp(-width), step.seconds * math.exp(width), mfu, cost,
        what_binds(account, job), tuple(notes), step,
    )  # fmt: skip


def told_by(job: Job) -> tuple[str, float]:
    """Whose peak the MFU is a share of, in FLOP/s of a device: that of the arithmetic's dtype, as in training, also where some
    products are made in 8 bits."""
    peaks = job.cluster.chip.peak
    name = job.dtype if job.dtype in peaks else max(peaks, key=lambda dtype: peaks[dtype])
    return f"{job.cluster.chip.name}'s {name} peak", peaks[name]


def bytes_moved(job: Job, step: Step) -> dict[str, dict[str, float]]:
    """Bytes that memory-bound work reads and writes in a step on the pipeline rank with the most work, by part and pass."""
    stages = [n for n, home in enumerate(step.placement) if home == step.slowest]
    layers = layers_by_stage(job)
    dense, routed = (float(sum(layers[n][kind] for n in stages)) for kind in (0, 1))
    pieces = [(dense, layer(job, routed=False))] if dense else []
    pieces += [(routed, layer(job, routed=True))] if routed else []
    pieces += [(1.0, embedding(job))] if 0 in stages else []
    pieces += [(1.0, head(job))] if len(layers) - 1 in stages else []
    moved: dict[str, dict[str, float]] = {}
    for times, tally in pieces:
        for entry in tally.entries:
            for name, size in zip(("forward", "backward_input", "backward_weight"), entry.bytes, strict=True):
                if np.any(size):
                    passes = moved.setdefault(entry.part, {})
                    passes[name] = passes.get(name, 0.0) + times * float(job.accumulation) * float(size)
    return moved


def memory_of(run: Run, job: Job) -> Memory:
    """The memory that the plan of a run as this job speaks of."""
    return exact(memory(job), run, job)


def exact(space: Memory, run: Run, job: Job) -> Memory:
    """The memory of this project's trainer, by the formulas that are held against its own count; what those do not know
    stays as it was estimated."""
    if job.stack.family != "shardwise" or not state.known(replace(run, train=replace(run.train, compile=False))):
        return space
    ranks, known = [], dict[tuple[object, ...], _Alike]()
    for estimated, rank in zip(space.ranks, first_ranks(run), strict=True):
        place = PlannedRank(run, rank)
        kind = state.alike(place)
        if kind not in known:  # of the many ranks of a long pipeline few differ in more than what is in flight
            known[kind] = _alike(place)
        same = known[kind]
        owners = same.owners | {"activations": state.activations_at(place) * same.saved}
        if run.layout.zero == 3 and run.layout.shard * run.layout.context > 1:  # besides, the layers of the moment
            owners["gathered"] += estimated["gathered"]
        owners["buffers"] = estimated["buffers"] + same.turned
        owners = {**estimated, **owners}
        updating = {name: value for name, value in (owners | same.updating).items() if name != "again"}
        owners = _fullest_moment(owners, run, same.late, same.gone)
        owners = max(owners, updating, key=lambda moment: sum(moment.values()))
        moving = sum(owners[name] for name in ("activations", "logits", "gathered", "buffers"))
        owners["workspace"] = job.stack.context_gib * GIB + job.stack.fragmentation * moving
        ranks.append(owners)
    return replace(space, ranks=tuple(ranks))


class _Alike(NamedTuple):
    """What ranks of one kind have in common."""

    owners: dict[str, float]
    saved: float
    """Share of the saved activations that is really kept."""
    late: float
    gone: float
    turned: float
    updating: dict[str, float]
    """What is otherwise when the largest matrix is updated."""


def _alike(place: PlannedRank) -> _Alike:
    run, rank = place.run, place.rank
    owners = state.owners(place)
    saved = 1.0 - state.compiled_away(run, rank) if compiles(run, gpu=planned_on_gpu(run)) else 1.0
    if owners["again"]:
        owners["again"] += state.passing_gradients(run, rank)
    late, turned = state.last_gradient(run, rank), state.transposed_gradient(run, rank)
    return _Alike(owners, saved, late, _kept_behind(place), turned, _updating(owners, place))


def _kept_behind(place: PlannedRank) -> float:
    """Bytes that layers behind the last one that is computed again have kept: gone when that one is."""
    run = place.run
    layers = list(place.layers())
    repeated = [number for number, (_, again) in enumerate(layers) if again]
    behind = layers[repeated[-1] + 1 :] if repeated else []
    if not behind:
        return 0.0
    job = job_of(replace(run, layout=replace(run.layout, recompute="none")))
    return sum(float(layer_activations(job, routed=run.model.is_moe(number))[0]) for number, _ in behind)


def _fullest_moment(owners: dict[str, float], run: Run, late: float, gone: float) -> dict[str, float]:
    """What stands at the same time: the loss's tensors are gone when a layer is computed again, and so is what layers behind the
    last such had kept (`gone`); the gradients of a step of one microbatch are there only when what was saved for them is not,
    the one that is made last (`late`) only then. It is fullest at the loss, in the last layer that is computed again, or in the
    first."""
    again = owners.pop("again")
    if run.accumulation == 1 and run.layout.pipeline == 1:
        # Of a loss in chunks the gradient of the head stays; of a whole one the probabilities, half of its tensors, go.
        kept = owners["activations"] - (0.0 if chunks_loss(run, gpu=planned_on_gpu(run)) else owners["logits"] / 2)
        made = max(owners["gradients"] - late, 0.0)
        moments = [
            owners | {"gradients": 0.0},
            owners | {"activations": kept - gone + again, "logits": 0.0, "gradients": 0.0},
            owners | {"activations": kept / run.model.layers + again, "logits": 0.0, "gradients": made},
        ]
        return max(moments, key=lambda moment: sum(moment.values()))
    if owners["logits"] >= again:
        return owners
    return owners | {"activations": owners["activations"] + again, "logits": 0.0}


def _updating(owners: dict[str, float], place: PlannedRank) -> dict[str, float]:
    """The moment when the largest matrix is updated: what the passes held is gone. AdamW makes nothing then."""
    made = muon.update_bytes(place) if place.run.train.optimizer == "muon" else 0
    gone = dict.fromkeys(("activations", "logits", "gathered"), 0.0)
    gradients = float(state.state_bytes(place.run, place.rank)["gradients"])
    return gone | {"gradients": gradients, "optimizer": owners["optimizer"] + made}


def known_chip(job: Job) -> bool:
    """Whether the fit has seen chips of this generation, or this very machine was measured."""
    seen = {name.split(":", 1)[1] for name in fitted()["effects"] if "/chip:" in name}
    return groups_of(job)["chip"] in seen or job.cluster.profile is not None


def notes_of(job: Job) -> list[str]:
    """Where the prediction stands on thin ice."""
    notes = []
    cluster = job.cluster
    if cluster.per_node > cluster.chip.devices_per_node and cluster.chip.name != "cpu":
        machines = -(-cluster.per_node // cluster.chip.devices_per_node)
        notes.append(
            f"{cluster.per_node} devices in one machine, where machines of {cluster.chip.name} have "
            f"{cluster.chip.devices_per_node}: of {machines} of them say cluster.nodes = {machines}"
        )
    if not known_chip(job):
        notes.append(
            f"no published training run on {job.cluster.chip.name} was fitted: its kernel curves alone speak; "
            "`shardwise bench` measures the machine it runs on, and cluster.profile uses that"
        )
    if job.layout.offload:
        notes.append("moving parameters and gradients between host and device is not part of the predicted time")
        if job.muon:
            notes.append("Muon's products are planned as if the device made them; with layout.offload the host does")
    if job.fp8 and job.cluster.chip.peak.get("fp8", 0) == 0:
        notes.append(f"{job.cluster.chip.name} has no 8-bit arithmetic; planned at 16 bits")
    return notes


TELLING = 0.8
"""A step that computes for so much of its time is limited by arithmetic, whatever else there is."""


def what_binds(account: Account, job: Job) -> str:
    """A sentence on what limits this layout most."""
    space = account.memory
    if not space.fits:
        rank = max(range(len(space.ranks)), key=lambda r: space.totals[r])
        owner = max(space.ranks[rank], key=lambda name: space.ranks[rank][name])
        return (
            f"memory: pipeline rank {rank} needs {space.peak / GIB:.1f} GiB of {space.capacity / GIB:.1f}, "
            f"most of it {owner} ({space.ranks[rank][owner] / GIB:.1f} GiB)"
        )
    total = account.step_seconds
    computing = sum(account.breakdown.get(name, 0.0) for name in ("matmul", "attention", "memory"))
    waits = {k: v for k, v in account.breakdown.items() if k not in ("matmul", "attention", "memory")}
    worst = max(waits, key=lambda name: waits[name])
    what = {
        "bubble": "waiting for the pipeline",
        "host": "launching kernels from the host",
        "other": "what does not scale with the work",
        "optimizer": "Muon's products" if job.muon else "the optimizer's memory traffic",
        "pipeline": "sending between stages",
        "data": "reading the batches",
    }.get(worst, f"traffic of the {worst} axis")
    share = f"{waits[worst] / total:.0%} of the step"
    if computing > TELLING * total:
        return f"arithmetic: {computing / total:.0%} of the step computes, next is {what}, {share}"
    return f"{what}: {share}"
