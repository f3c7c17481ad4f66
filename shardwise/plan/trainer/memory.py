"""The memory of this project's trainer, rank by rank: what `state.py` knows to the byte, in the place of the estimates of
`cost/memory.py`; and which moment of a step is the peak."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from shardwise.ledger import Memory
from shardwise.plan.cost.host import IN_FLIGHT
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.cost.memory import buffers, layer_activations, memory, moving, workspace
from shardwise.plan.trainer import muon, state
from shardwise.plan.trainer.rank import PlannedRank, planned_rank
from shardwise.plan.trainer.traffic import first_ranks
from shardwise.run import Run
from shardwise.run.derive import chunks_loss, compiles, planned_on_gpu
from shardwise.run.sections.objective import FACTS


def memory_of(run: Run, job: Job) -> Memory:
    """The memory of a run as this job: exact where this project's trainer runs it and its formulas know the run, else estimated."""
    estimate = memory(job)
    if not _is_exact(run, job):
        return estimate
    return replace(estimate, ranks=_all_ranks(run, job, estimate, {}))


def memory_that_fits(run: Run, job: Job, most: float = math.inf) -> Memory | None:
    """The memory of a run as this job, or None where it is more than a device has, or than `most`. Ranks near the ends of the
    pipeline tell most of those that do not fit, in a fraction of the time that all ranks take."""
    known: dict[tuple[object, ...], _Alike] = {}
    if _is_exact(run, job):
        ranks, limit = first_ranks(run), min(float(job.cluster.chip.memory) * (1.0 - job.headroom), most)
        least = {"gathered": 0.0, "buffers": float(buffers(job))}
        for rank in dict.fromkeys((ranks[min(1, len(ranks) - 1)], ranks[0], ranks[-1])):
            place = planned_rank(run, rank)
            if sum(_rank_memory(place, job, least, _known_alike(place, known)).values()) > limit:
                return None
        estimate = memory(job)
        found = replace(estimate, ranks=_all_ranks(run, job, estimate, known))
    else:
        found = memory(job)
    return found if found.fits and found.peak <= most else None


def _all_ranks(
    run: Run, job: Job, estimate: Memory, known: dict[tuple[object, ...], _Alike]
) -> tuple[dict[str, float], ...]:
    places = (planned_rank(run, rank) for rank in first_ranks(run))
    each = zip(places, estimate.ranks, strict=True)
    return tuple(_rank_memory(place, job, estimated, _known_alike(place, known)) for place, estimated in each)


def _known_alike(place: PlannedRank, known: dict[tuple[object, ...], _Alike]) -> _Alike:
    """Of the many ranks of a long pipeline few differ in more than what is in flight."""
    kind = state.alike(place)
    if kind not in known:
        known[kind] = _alike(place)
    return known[kind]


def _is_exact(run: Run, job: Job) -> bool:
    return job.framework.family == "shardwise" and state.known(replace(run, train=replace(run.train, compile=False)))


def _rank_memory(place: PlannedRank, job: Job, estimated: Mapping[str, float], same: _Alike) -> dict[str, float]:
    """Of one rank, by owner; of the estimate it takes the layers that ZeRO-3 gathers, and the buffers."""
    run = place.run
    owners = same.owners | {"activations": state.activations_at(place) * same.saved}
    if run.layout.zero == 3 and run.layout.shard * run.layout.context > 1:
        # Besides, the layers of the moment; one that was prefetched is the first of them.
        first = max(place.prefetched_shard(stage) for stage in place.stages) * place.size("zero")
        owners["gathered"] = max(owners["gathered"] - first, 0.0) + estimated["gathered"]
    if run.memory.activations == "host":  # what is still on its way there when the forward pass ends
        owners["activations"] += min(state.activations_away(place), IN_FLIGHT)
    owners["buffers"] = estimated["buffers"] + same.transposed
    owners = {**estimated, **owners}
    updating = {name: value for name, value in (owners | same.updating).items() if name != "recompute"}
    owners = _peak(owners, run, same)
    owners = max(owners, updating, key=lambda moment: sum(moment.values()))
    owners["workspace"] = workspace(job, moving(owners))
    return owners


class _Alike(NamedTuple):
    """What ranks of one kind have in common."""

    owners: dict[str, float]
    saved: float
    """Share of the saved activations that compiled layers really keep."""
    last_gradient: float
    """Bytes of the gradient that is made last."""
    behind: float
    """Bytes saved by layers behind the last one that is recomputed: freed when that one is."""
    transposed: float
    updating: dict[str, float]
    """What differs when the largest matrix is updated."""


def _alike(place: PlannedRank) -> _Alike:
    run, rank = place.run, place.rank
    owners = state.owners(place)
    saved = 1.0 - state.compiled_away(run, rank) if compiles(run, gpu=planned_on_gpu(run)) else 1.0
    if owners["recompute"]:
        owners["recompute"] += state.passing_gradients(run, rank)
    last, transposed = state.last_gradient(run, rank), state.transposed_gradient(run, rank)
    return _Alike(owners, saved, last, _saved_behind(place), transposed, _updating(owners, place))


def _saved_behind(place: PlannedRank) -> float:
    """Bytes saved by the layers behind the last one that is recomputed."""
    run = place.run
    layers = list(place.layers())
    recomputed = [number for number, (_, flops) in enumerate(layers) if flops]
    behind = Counter(run.model.is_moe(number) for number, _ in (layers[recomputed[-1] + 1 :] if recomputed else []))
    if not behind:
        return 0.0
    job = job_of(replace(run, layout=replace(run.layout, recompute="none")))
    return sum(count * float(layer_activations(job, routed=routed)[0]) for routed, count in behind.items())


def _peak(owners: dict[str, float], run: Run, same: _Alike) -> dict[str, float]:
    """What is held at the peak: at the loss, in the last layer that is recomputed, or in the first.

    The loss's tensors are gone when a layer is recomputed, and so is what the layers behind it had saved. In a step of one
    microbatch gradients come only as the activations saved for them go.
    """
    recomputed = owners.pop("recompute")
    if run.memory.hosts_optimizer:
        return _hosted_peak(owners, run, same, recomputed)
    if run.accumulation == 1 and run.layout.pipeline == 1:
        # Of a chunked loss the gradient of the head stays; of a whole one the probabilities, half of its tensors, go.
        in_chunks = chunks_loss(run, gpu=planned_on_gpu(run)) or FACTS[run.objective.kind].logprobs
        saved = owners["activations"] - (0.0 if in_chunks else owners["logits"] / 2)
        made = max(owners["gradients"] - same.last_gradient, 0.0)
        moments = [
            owners | {"gradients": 0.0},
            owners | {"activations": saved - same.behind + recomputed, "logits": 0.0, "gradients": 0.0},
            owners | {"activations": saved / run.model.layers + recomputed, "logits": 0.0, "gradients": made},
        ]
        return max(moments, key=lambda moment: sum(moment.values()))
    if owners["logits"] >= recomputed:
        return owners
    return owners | {"activations": owners["activations"] + recomputed, "logits": 0.0}


def _hosted_peak(owners: dict[str, float], run: Run, same: _Alike, recomputed: float) -> dict[str, float]:
    """The same where gradients go to the host: the head's is gone when the last layer is recomputed. Then those of layers behind
    wait for their way, as many as may, while what these had saved is gone."""
    moved, m = state.hosted(run), run.model
    in_chunks = chunks_loss(run, gpu=planned_on_gpu(run))
    head = min(m.head_rows * m.hidden * 4.0, moved.largest) if in_chunks else owners["logits"] / 2
    layer = (moved.device - 2.0 * moved.largest) / m.layers
    kept = owners["activations"] / m.layers
    waiting = max(IN_FLIGHT * (1.0 - kept / layer), 0.0) if m.layers * layer > IN_FLIGHT else 0.0
    moments = [
        owners | {"gradients": 0.0},
        owners
        | {"activations": owners["activations"] - head - same.behind + recomputed, "logits": 0.0, "gradients": waiting},
        owners | {"activations": kept + recomputed, "logits": 0.0},
    ]
    return max(moments, key=lambda moment: sum(moment.values()))


def _updating(owners: dict[str, float], place: PlannedRank) -> dict[str, float]:
    """The moment when the largest matrix is updated: what the passes held is gone. AdamW needs nothing more then."""
    made = muon.update_bytes(place) if place.run.train.optimizer == "muon" else 0
    gone = dict.fromkeys(("activations", "logits", "gathered"), 0.0)
    gradients = float(state.state_bytes(place.run, place.rank)["gradients"])
    return gone | {"gradients": gradients, "optimizer": owners["optimizer"] + made}
