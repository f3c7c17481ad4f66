"""The memory of this project's trainer, rank by rank: the exact bytes of `state.py` in place of the estimates of `cost/memory.py`,
and the moment of a step at which memory peaks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.ledger import OWNERS, Memory
from shardwise.plan.cost import memory as formulas
from shardwise.plan.cost.host import IN_FLIGHT
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.trainer import muon, state
from shardwise.plan.trainer.rank import PlannedRank, first_ranks, planned_rank
from shardwise.plan.trainer.saved import Saved
from shardwise.plan.trainer.units import head_gathered, head_sent, head_shrinks, outer_units
from shardwise.run import Run
from shardwise.run.derive import chunks_loss, compiles, planned_on_gpu
from shardwise.run.sections.objective import FACTS


def memory_of(run: Run, job: Job) -> Memory:
    """The memory of a run as this job: exact where this project's trainer runs it and its formulas cover it, else estimated."""
    if not _is_exact(run, job):
        return formulas.memory(job)
    ranks = _Ranks(run, job)
    return Memory(tuple(map(ranks.at, first_ranks(run))), ranks.capacity)


def memory_of_rank(run: Run, job: Job, rank: int) -> dict[str, float]:
    """Bytes of one rank by owner. `memory_of` has the first rank of each stage, whose slices may be a row larger than another's."""
    if not _is_exact(run, job):
        return dict(formulas.memory(job).ranks[planned_rank(run, rank).index("pipeline")])
    return _Ranks(run, job).at(rank)


def memory_that_fits(run: Run, job: Job, most: float = math.inf) -> Memory | None:
    """The memory of a run as this job, or None where it exceeds the memory of a device, or `most`. Ranks near the ends of the
    pipeline go first: they find most runs that do not fit, in a fraction of the time that all ranks take."""
    if not _is_exact(run, job):
        found = formulas.memory(job)
        return found if found.fits and found.peak <= most else None
    every, ranks = first_ranks(run), _Ranks(run, job)
    known: dict[int, dict[str, float]] = {}
    for rank in dict.fromkeys((every[min(1, len(every) - 1)], every[0], every[-1], *every)):
        known[rank] = ranks.at(rank)
        if sum(known[rank].values()) > min(ranks.capacity, most):
            return None
    return Memory(tuple(known[rank] for rank in every), ranks.capacity)


class _Ranks:
    """The ranks of a run, counted one by one. Most ranks of a long pipeline differ only in the microbatches in flight."""

    def __init__(self, run: Run, job: Job) -> None:
        self.run, self.job = run, job
        self.capacity = float(job.cluster.chip.memory) * (1.0 - job.headroom)
        # The estimate provides what these formulas do not cover: the layers that ZeRO-3 gathers, and the buffers. In a pipeline
        # memory peaks in a backward pass, while ZeRO-2 reduces a layer's gradient.
        lay = run.layout
        reduces = lay.zero == 2 and lay.pipeline > 1 and not lay.gathers_each_pass
        owners = dict.fromkeys(OWNERS, 0.0) | {
            "gathered": float(formulas.gathered_layers(job)),
            "buffers": float(formulas.buffers(job)) + reduces * float(formulas.reduced_layer(job)),
        }
        in_layers = 0.0
        if lay.gathers_each_pass and lay.pipeline == 1:
            in_layers = float(formulas.gathered_layers(job) - formulas.gathered_layer(job))
        counted = lay.pipeline > 1 or lay.gathers_each_pass
        self.estimated = _Estimated(owners, in_layers, float(formulas.reduced_layer(job)) if counted else 0.0)
        self.known: dict[tuple[object, ...], _Alike] = {}

    def at(self, rank: int) -> dict[str, float]:
        """Bytes of one rank by owner."""
        place = planned_rank(self.run, rank)
        kind = state.alike(place)
        if kind not in self.known:
            self.known[kind] = _alike(place)
        return _rank_memory(place, self.job, self.estimated, self.known[kind])


def _is_exact(run: Run, job: Job) -> bool:
    """Whether this project's trainer runs it and the formulas hold: they do not where `layout.offload` is on."""
    return job.framework.family == "shardwise" and not run.layout.offload


class _Estimated(NamedTuple):
    """What the exact formulas do not cover."""

    owners: Mapping[str, float]
    in_layers: float
    """Gathered bytes that are not there at the loss."""
    reduced: float
    """Bytes of these owners that are a layer's gradient as it is reduced."""


def _rank_memory(place: PlannedRank, job: Job, estimate: _Estimated, same: _Alike) -> dict[str, float]:
    """Bytes of one rank by owner; the layers that ZeRO-3 gathers, and the buffers, come from the estimate."""
    run, standing, estimated = place.run, same.standing, estimate.owners
    owners = standing.owners | {"activations": state.activations(place, same.saves) * same.saved}
    if run.layout.gathers_each_pass and run.layout.shard * run.layout.context > 1:
        # Besides, the layers that are gathered at the moment; a prefetched one is the first of them.
        first = max(place.prefetched_shard(stage) for stage in place.stages) * place.size("zero")
        owners["gathered"] = max(owners["gathered"] - first, 0.0) + estimated["gathered"]
    if run.memory.activations == "host":  # what is still being offloaded when the forward pass ends
        owners["activations"] += min(state.activations_away(place), IN_FLIGHT)
    owners["buffers"] = estimated["buffers"] + standing.transposed
    owners = {**estimated, **owners}
    updating = owners | standing.updating
    gathered = owners["gathered"] - standing.head_gathered
    reducing = owners | {"activations": 0.0, "logits": 0.0, "gathered": gathered}
    both = _split_peak(place, same.saves)
    if both is not None:
        owners |= {"activations": float(both[0]), "gradients": float(both[1])}
    owners = _peak(owners, run, same, estimate)
    owners = max(owners, updating, reducing, key=lambda moment: sum(moment.values()))
    owners["workspace"] = formulas.workspace(job, owners)
    return owners


def _split_peak(planned: PlannedRank, each: Sequence[Saved]) -> tuple[int, int] | None:
    """Bytes of activations and of gradients at the moment when a rank whose schedule splits the backward pass has the most of both
    together: deferred gradients come when activations go. None where the peaks of the two coincide, or nothing is sharded."""
    if not (planned.splits_backward and planned.is_sharded and planned.width < planned.reduce_width):
        return None
    whole, deferred = state.by_number(planned, each)
    summed, fresh = dict[int, int](), dict[int, int]()
    for stage in planned.stages:
        own = [(count * p.numel, p.entry.is_linear) for count, p in planned.parameters(stages=(stage,)) if p.learns]
        summed[stage.number] = planned.reduce_width * sum(numel for numel, _ in own)
        fresh[stage.number] = planned.width * sum(numel for numel, linear in own if linear)
    held, waiting, adding = 0, set[int](), set[int]()
    moments = []
    for kind, at, _ in state.short_schedule(planned.run)[0].ranks[planned.index("pipeline")]:
        gradients = sum(summed[n] for n in adding) + sum(fresh[n] for n in waiting)
        moments.append((held + whole[at] * (kind == "F"), gradients))
        if kind == "F":
            held += whole[at]
        elif kind == "W":
            held -= deferred[at]
            waiting.add(at)
        elif kind in ("I", "B"):
            held -= whole[at] - (deferred[at] if kind == "I" else 0)
            if at in waiting or kind == "B":  # the pass adds up what is there
                adding.add(at)
                waiting.discard(at)
    return max(moments, key=sum)


class _Standing(NamedTuple):
    """Bytes of a rank that do not depend on what it recomputes."""

    owners: dict[str, float]
    last_gradient: float
    """Bytes of the gradient that is computed last."""
    head_shrinks: float
    """Bytes by which the head's gradient is smaller behind the loss."""
    transposed: float
    left_over: float
    """Bytes of the gradients outside the layers as they were reduced, which `fully_shard` keeps until its next reduction."""
    updating: dict[str, float]
    """The owners whose bytes differ while the largest matrix is updated."""
    head_sent: float
    """Bytes that arrive, and of their sum, where the head's gradient is exchanged by itself behind the loss."""
    head_gathered: float
    """Bytes of the head where it is gathered by itself: gone when the layers' gradients are computed."""


@lru_cache(maxsize=64)
def _standing(run: Run, rank: int) -> _Standing:
    """Cached, because a search asks for many runs that differ only in what is recomputed."""
    place = planned_rank(run, rank)
    stays = state.state_bytes(run, rank)
    own = stays | dict(
        gradients=state.peak_gradients(place, stays["gradients"]),
        gathered=state.gathered(place) + state.made_for_gemms(place),
        logits=state.logits(place),
    )
    owners = {owner: float(size) for owner, size in own.items()}
    last, transposed = state.last_gradient(place), state.transposed_gradient(place)
    sent, shrinks = (head_sent(place), head_gathered(place)), head_shrinks(place)
    return _Standing(owners, last, shrinks, transposed, _left_over(place), _updating(place, stays), *sent)


def _left_over(place: PlannedRank) -> float:
    """Nothing where gradients are reduced once a step: then no microbatch follows."""
    run = place.run
    each_microbatch = place.is_sharded and run.layout.zero >= 2 and not place.splits_backward
    if not each_microbatch or run.accumulation == 1 or run.memory.hosts_optimizer:
        return 0.0
    total = 0
    for stage in place.stages:
        units = (sum(p.numel for p in unit if p.learns) for unit, _ in reversed(outer_units(place, stage)))
        total += next(filter(None, units), 0)  # the last that is reduced
    return float(total * (place.width if place.exchanges_gradients else place.reduce_width))


class _Alike(NamedTuple):
    """What ranks of one kind have in common."""

    standing: _Standing
    saves: tuple[Saved, ...]
    """By stage."""
    saved: float
    """Share of the saved activations that compiled layers really keep."""
    recomputed: float
    """Temporary bytes of the layer that is being recomputed."""
    behind: float
    """Bytes saved by the layers after the last recomputed one: freed by the time that one is recomputed."""


def _alike(place: PlannedRank) -> _Alike:
    run, lay = place.run, place.run.layout
    # Compute copies are kept only where nothing is recomputed. Otherwise recomputation does not change `_Standing`.
    plain = dict(recompute="full", recompute_budget=0.0, recompute_operations=(), recompute_every=1)
    stands = run if place.keeps_compute_copies else replace(run, layout=replace(lay, **plain))  # type: ignore[arg-type]
    saves = state.saved_by_stages(place)
    compiled = compiles(run, gpu=place.fused)
    saved = 1.0 - state.compiled_away(place) if compiled else 1.0
    recomputed = float(max(stage.recomputed for stage in saves))
    if recomputed:
        recomputed += state.passing_gradients(place, compiled=compiled) + _gradients_beyond(place)
        recomputed = max(recomputed, _gradients_at_end(place)) if compiled else recomputed
    return _Alike(_standing(stands, place.rank), saves, saved, recomputed, _saved_behind(place))


def _gradients_beyond(place: PlannedRank) -> float:
    """Bytes by which gradients of a dense layer's feed-forward matrices, in the compute dtype, exceed its tensors of that width:
    while attention's gradients are computed, these are there and those are gone."""
    m, lay = place.run.model, place.run.layout
    if not place.is_sharded or m.experts:
        return 0.0
    own = (p for p in place.layer_parameters(False) if p.entry.name.startswith("ffn.") and p.entry.is_linear)
    matrices = sum(p.numel for p in own if p.learns)
    made = (3 if m.gated else 2) * place.tokens * m.ffn // lay.tensor
    return float(max(matrices - made, 0) * place.width)


def _gradients_at_end(place: PlannedRank) -> float:
    """Bytes at the end of a dense layer's backward pass, if its feed-forward part has no gate: compiled code then computes the
    gradients of the feed-forward matrices last, from a whole sequence and a hidden one, beside those of attention."""
    m, lay = place.run.model, place.run.layout
    if not place.is_sharded or m.experts or m.gated:
        return 0.0
    matrices = sum(p.numel for p in place.layer_parameters(False) if p.entry.is_linear and p.learns)
    return float((matrices + place.tokens * (m.hidden + m.ffn // lay.tensor)) * place.width)


def _saved_behind(place: PlannedRank) -> float:
    """Bytes saved by the layers after the last recomputed one."""
    run = place.run
    layers = list(place.recomputed.items())
    recomputed = [number for number, (_, flops) in enumerate(layers) if flops]
    behind = Counter(run.model.is_moe(number) for number, _ in (layers[recomputed[-1] + 1 :] if recomputed else []))
    if not behind:
        return 0.0
    plain = replace(run, layout=replace(run.layout, recompute="none", recompute_budget=0.0))
    return sum(count * _layer_saved(plain, routed) for routed, count in behind.items())


@lru_cache(maxsize=64)
def _layer_saved(run: Run, routed: bool) -> float:
    """Bytes that a layer of a run saves, by the estimate; cached, since every budget that is tried asks."""
    return float(formulas.layer_activations(job_of(run), routed=routed)[0])


def _peak(owners: dict[str, float], run: Run, same: _Alike, estimate: _Estimated) -> dict[str, float]:
    """Bytes by owner at the peak: at the loss, in the last layer that is recomputed, or in the first.

    When a layer is recomputed, the loss's tensors are freed, and so are the saved tensors of the layers after it. In a step of
    one microbatch, gradients appear only as the activations saved for them are freed.
    """
    recomputed, shrinks = same.recomputed, same.standing.head_shrinks
    if run.memory.hosts_optimizer:
        return _hosted_peak(owners, run, same)
    # The gradients that were reduced last, in the microbatch before, are there until the first layer is reduced.
    left = same.standing.left_over
    owners = owners | {"buffers": owners["buffers"] + max(left - estimate.reduced, 0.0)}
    at_loss = owners | {"gathered": owners["gathered"] - estimate.in_layers}
    behind_head = owners | {"gathered": owners["gathered"] - same.standing.head_gathered}
    if run.layout.pipeline == 1:
        at_loss["buffers"] += min(left, estimate.reduced)
    if run.accumulation == 1 and run.layout.pipeline == 1:
        # A chunked loss keeps the gradient of the head; a full one frees the probabilities, half of its tensors.
        in_chunks = chunks_loss(run, gpu=planned_on_gpu(run)) or FACTS[run.objective.kind].logprobs
        saved = owners["activations"] - (shrinks if in_chunks else owners["logits"] / 2)
        made = max(owners["gradients"] - same.standing.last_gradient, 0.0)
        moments = [
            at_loss | {"gradients": 0.0},
            behind_head | {"activations": saved - same.behind + recomputed, "logits": 0.0, "gradients": 0.0},
            behind_head | {"activations": saved / run.model.layers + recomputed, "logits": 0.0, "gradients": made},
            at_loss | {"buffers": at_loss["buffers"] + same.standing.head_sent, "logits": 0.0, "gradients": 0.0},
        ]
        return max(moments, key=lambda moment: sum(moment.values()))
    in_layer = behind_head | {"activations": owners["activations"] - shrinks + recomputed, "logits": 0.0}
    sent = at_loss | {"buffers": at_loss["buffers"] + same.standing.head_sent, "logits": 0.0}
    return max(at_loss, in_layer, sent, key=lambda moment: sum(moment.values()))


def _hosted_peak(owners: dict[str, float], run: Run, same: _Alike) -> dict[str, float]:
    """Bytes by owner at the peak where gradients go to the host. The head's gradient is gone when the last layer is recomputed.
    Then the gradients of the layers after it wait for their transfer, up to the limit, while these layers' saved tensors are
    freed."""
    moved, m = state.hosted(run), run.model
    in_chunks = chunks_loss(run, gpu=planned_on_gpu(run))
    head = min(m.head_rows * m.hidden * 4.0, moved.largest) if in_chunks else owners["logits"] / 2
    layer = (moved.device - 2.0 * moved.largest) / m.layers
    kept, recomputed = owners["activations"] / m.layers, same.recomputed
    waiting = max(IN_FLIGHT * (1.0 - kept / layer), 0.0) if m.layers * layer > IN_FLIGHT else 0.0
    moments = [
        owners | {"gradients": 0.0},
        owners
        | {"activations": owners["activations"] - head - same.behind + recomputed, "logits": 0.0, "gradients": waiting},
        owners | {"activations": kept + recomputed, "logits": 0.0},
    ]
    return max(moments, key=lambda moment: sum(moment.values()))


def _updating(place: PlannedRank, stays: Mapping[str, int]) -> dict[str, float]:
    """Bytes by owner while the largest matrix is updated: the tensors of the passes are freed. AdamW needs no more then."""
    made = muon.update_bytes(place) if place.run.train.optimizer == "muon" else 0
    gone = dict.fromkeys(("activations", "logits", "gathered"), 0.0)
    return gone | {"gradients": float(stays["gradients"]), "optimizer": float(stays["optimizer"] + made)}
