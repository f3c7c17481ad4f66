"""What a rank of this project's trainer holds, to the byte: parameters, gradients and optimizer, which stay, and what the
forward passes save for the backward passes, which comes and goes with the schedule (tensor by tensor in `saved/`)."""

from __future__ import annotations

from dataclasses import replace

from shardwise.plan.trainer.rank import Place, Stage, Weight, piece
from shardwise.plan.trainer.saved import Rows, Saved, repeated, saved
from shardwise.run import Run
from shardwise.run.derive import chunk_rows, compiles, planned_on_gpu
from shardwise.schedules import Schedule, cached_schedule, fewer_rounds, high_water

STEPS = 4
"""Bytes of the count of steps that AdamW keeps with every parameter."""


def held(run: Run, rank: int) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients after the backward passes, and optimizer.

    Parameters and gradients are float32, or float64 where the arithmetic is; but matrices of which copies in the dtype of their
    products are kept count with those, and their gradients are of that dtype. `fully_shard` deals rows out in equal pieces and
    pads the last ones, of parameters and of gradients; what the optimizer remembers has no padding. Experts are dealt out along a
    dimension that needs none, where they have one. DistributedDataParallel's gradients are views of its buckets, which hold
    nothing else.
    """
    place = Place(run, rank)
    parameters = gradients = optimizer = 0
    for count, weight, in_layer in _weights(place):
        ranks, index = _sharing(place, weight)
        parameters += count * weight.shard(ranks) * place.wide
        copied = place.keeps_compute_copies and weight.product and in_layer
        parameters += count * weight.numbers * place.width * copied
        gradients += count * weight.shard(ranks) * (place.width if copied else place.wide)
        own = weight.own(ranks, index) * place.wide
        muon = run.train.optimizer == "muon" and in_layer and len(weight.shape) > 1
        optimizer += count * (own if muon else 2 * own + STEPS)
    return dict(parameters=parameters, gradients=gradients, optimizer=optimizer)


def _weights(place: Place) -> list[tuple[int, Weight, bool]]:
    """Every parameter, alike ones together: how many, and whether it stands inside of a layer."""
    outer = [weight for stage in place.stages for weight in place.outer_weights(stage)]
    found = list(place.weights())
    inside = len(found) - len(outer)
    return [(count, weight, n < inside) for n, (count, weight) in enumerate(found)]


def _sharing(place: Place, weight: Weight) -> tuple[int, int]:
    """Over how many ranks a parameter is shared, and the place of this one among them."""
    if not place.shared:
        return 1, 0
    group = "expert_shard" if weight.routed else "zero"
    return place.sizes[group], place.index(group)


def known(run: Run) -> bool:
    """Whether these formulas hold for a run: not for what a compiler chooses to keep, nor for what is held in the host's
    memory."""
    return not compiles(run, gpu=planned_on_gpu(run)) and not run.layout.offload


def alike(place: Place) -> tuple[object, ...]:
    """What the first ranks of two pipeline ranks have to share to hold the same, but for how many microbatches are in flight."""
    layers = dict(place.layers())
    kinds = (
        (stage.first, stage.last, tuple((place.routed(n), layers[n]) for n in stage.layers)) for stage in place.stages
    )
    return tuple(kinds)


def owners(place: Place) -> dict[str, float]:
    """The most bytes of a rank by owner, of those owners that these formulas know, without the activations; and `again`, what
    the layer that is computed again makes for a moment."""
    run, rank = place.run, place.rank
    own = held(run, rank) | dict(
        gradients=waiting_gradients(run, rank),
        gathered=gathered(run, rank),
        logits=_scores(place) if any(stage.last for stage in place.stages) else 0,
        again=max(_keeps(place, stage).again for stage in place.stages),
    )
    return {owner: float(size) for owner, size in own.items()}


def _scores(place: Place) -> int:
    """Bytes of the loss's own tensors beside those that it saves."""
    rows = piece(place.run.model.vocab, place.run.layout.tensor, place.index("tensor"))
    if place.chunked:  # some scores, which become their gradient, and the matrix where it was cast
        some = chunk_rows(place.tokens, rows * place.width)
        return (some + (0 if place.shared else place.run.model.hidden)) * rows * place.width
    # The probabilities are saved; beside them stand twice as many numbers, their gradient and that of the scores.
    return 2 * place.tokens * rows * place.wide


def saved_activations(run: Run, rank: int, rows: Rows | None = None) -> dict[int, int]:
    """Bytes that one microbatch keeps for its backward pass, by stage of this rank. `rows` tells how tokens were routed."""
    place = Place(run, rank)
    return {stage.number: saved(place, stage, rows).whole for stage in place.stages}


_KNOWN: dict[tuple[object, ...], Saved] = {}


def _keeps(place: Place, stage: Stage) -> Saved:
    """`saved` under an even load, remembered: stages that are alike save alike."""
    layers = tuple((place.routed(layer), again) for layer, again in repeated(place, stage).items())
    alike = (place.run, place.index("tensor"), stage.first, stage.last, layers)
    if alike not in _KNOWN:
        if len(_KNOWN) > 1000:
            _KNOWN.clear()
        _KNOWN[alike] = saved(place, stage)
    return _KNOWN[alike]


def activations(run: Run, rank: int) -> int:
    """The most that all microbatches in flight keep on a rank, as its schedule plays."""
    return activations_at(Place(run, rank))


def activations_at(place: Place) -> int:
    """The same of a rank that was looked at already."""
    run = place.run
    keeps = {stage.number: _keeps(place, stage) for stage in place.stages}
    if run.layout.pipeline == 1:
        return keeps[0].whole
    whole, deferred = ([0] * len(place.placement) for _ in range(2))
    stream = place.tokens // place.sizes["tensor"] * run.model.hidden * place.width
    for number, keep in keeps.items():
        # What a stage on this rank gave to the next one here is one tensor, which the first keeps for longer.
        whole[number] = keep.whole - (stream if number - 1 in keeps else 0)
        deferred[number] = keep.deferred
    schedule, longer = _short(run)
    own = replace(schedule, ranks=(schedule.ranks[place.index("pipeline")],))
    return round(high_water(own, whole, deferred)[0] * longer)


def _short(run: Run) -> tuple[Schedule, float]:
    """The run's schedule, or one of fewer microbatches whose high water is the same, or known to be so many times less."""
    lay, n = run.layout, run.accumulation
    count = fewer_rounds(lay.pipeline, n, 4)
    schedule = cached_schedule(lay.schedule, lay.pipeline, count, lay.stages_per_rank)
    # These hold every microbatch.
    return schedule, n / count if lay.schedule in ("gpipe", "breadth-first") else 1.0


def gathered(run: Run, rank: int) -> int:
    """Bytes of whole parameters between the passes: all of them below ZeRO-3; there what stands outside of the layers, where
    no pipeline lets it go."""
    place = Place(run, rank)
    if not place.shared:
        return 0
    total = 0
    for count, weight, in_layer in _weights(place):
        ranks, _ = _sharing(place, weight)
        if weight.routed and ranks == place.sizes["replicate"] == 1 and not run.layout.offload:
            continue  # experts that no other rank holds a part of
        if run.layout.zero < 3 or not (in_layer or run.layout.pipeline > 1):
            total += count * place.gathered_shard(weight, ranks) * ranks
    return total


def passing_gradients(run: Run, rank: int) -> int:
    """Bytes of the gradients that pass through the widest part of a layer while all that it saved is there: those of the
    product of gate and up, and of one of the two. A compiled layer makes them in place."""
    m, place = run.model, Place(run, rank)
    if compiles(run, gpu=planned_on_gpu(run)):
        return 0
    width = max(m.ffn, m.expert_ffn * m.experts_per_token) // run.layout.tensor
    return (2 if m.gated else 1) * place.tokens * width * place.width


def last_gradient(run: Run, rank: int) -> int:
    """Bytes of the gradient that is made when all saved activations are gone: the embedding's."""
    place = Place(run, rank)
    if run.model.tied_embeddings or not place.stages[0].first:
        return 0
    weight = place.outer_weights(place.stages[0])[0]
    return weight.shard(_sharing(place, weight)[0]) * place.wide


def turned_gradient(run: Run, rank: int) -> int:
    """Bytes of the second copy of a gradient that is dealt out along another dimension than the first: `fully_shard` lays the
    pieces one behind the other before it scatters them, one matrix after the other."""
    place = Place(run, rank)
    turned = [weight for _, weight in place.weights() if weight.dealt_along(_sharing(place, weight)[0])]
    return max((weight.numbers * place.width for weight in turned), default=0)


def waiting_gradients(run: Run, rank: int) -> int:
    """The most bytes of gradients between two passes: whole ones where they are added over ranks once a step."""
    place = Place(run, rank)
    own = held(run, rank)["gradients"]
    once = run.layout.zero == 1 and run.accumulation > 1
    if not place.shared or not (once or place.splits_backward):
        return own
    return max(own, place.reduced * sum(count * weight.numbers for count, weight in place.weights()))


def compiled_away(run: Run, rank: int) -> float:
    """Share of the saved activations that a compiled layer does without: the gate's function is computed again from the gate."""
    place = Place(run, rank)
    if not run.model.gated:
        return 0.0
    dense = sum(1 for layer, again in place.layers() if not again and not _routed(run, layer))
    away = dense * place.tokens * run.model.ffn // run.layout.tensor * place.width
    return away / max(1, sum(saved_activations(run, rank).values()))


def _routed(run: Run, layer: int) -> bool:
    return bool(run.model.experts) and layer >= run.model.dense_layers
