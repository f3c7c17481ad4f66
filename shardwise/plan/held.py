"""What a rank of this project's trainer holds, to the byte: parameters, gradients and optimizer, which stay, and what the
forward passes save for the backward passes, which comes and goes with the schedule (tensor by tensor in `saved.py`)."""

from __future__ import annotations

from shardwise.plan.place import Place, Weight
from shardwise.plan.saved import Rows, saved
from shardwise.run import Run

STEPS = 4
"""Bytes of the count of steps that AdamW keeps with every parameter."""


def held(run: Run, rank: int) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients after the backward passes, and optimizer.

    Parameters and gradients are float32, or float64 where the arithmetic is. `fully_shard` deals rows out in equal pieces and
    pads the last ones, of parameters and of gradients; what the optimizer remembers has no padding. DistributedDataParallel's
    gradients are views of its buckets, which hold nothing else.
    """
    place = Place(run, rank)
    parameters = optimizer = 0
    for count, weight, in_layer in _weights(place):
        ranks, index = _sharing(place, weight)
        parameters += count * weight.shard(ranks) * place.wide
        own = weight.own(ranks, index) * place.wide
        muon = run.train.optimizer == "muon" and in_layer and len(weight.shape) > 1
        optimizer += count * (own if muon else 2 * own + STEPS)
    return dict(parameters=parameters, gradients=parameters, optimizer=optimizer)


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


def fuses(run: Run) -> bool:
    """Whether norms and attention have the kernels of a GPU."""
    return run.train.device != "cpu" and run.cluster.chip not in ("", "cpu")


def saved_activations(run: Run, rank: int, rows: Rows | None = None) -> dict[int, int]:
    """Bytes that one microbatch keeps for its backward pass, by stage of this rank. `rows` tells how tokens were routed."""
    place = Place(run, rank)
    return {stage.number: saved(place, stage, fuses(run), rows) for stage in place.stages}
