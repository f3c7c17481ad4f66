"""Seconds of the passes over one stage: forward, recomputation, backward to the inputs and to the weights.

The entries of `operations.py` are added up by category, scaled by the fitted constants, and put together the way the streams
of a device run: traffic that the program can hide lies behind the work beside it, the rest is exposed; a device that
finishes its kernels before the host has launched the next waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.plan.cost.constants import Constants
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.operations import embedding, head, layer
from shardwise.plan.cost.operations import pieces as stream_tokens
from shardwise.plan.cost.ops import FORWARD, INPUT, WEIGHT, Entry, Tally
from shardwise.plan.cost.parameters import cast_copies, layer_parameters

Number = Any
CATEGORIES = ("matmul", "attention", "memory", "tensor", "context", "expert")
FORWARDS, RECOMPUTE, INPUTS, WEIGHTS = range(4)
SHARPNESS = 4.0
"""Of the turn from device-bound to host-bound."""
ONE_AFTER_THE_OTHER = 1.0
"""The same on a CPU, where the host is the device."""


def repeated(job: Job, entry: Entry) -> float:
    """Which share of this entry the backward pass computes again, in a layer that is recomputed."""
    lay, stack = job.layout, job.stack
    if lay.recompute in ("full", "budget"):
        return 0.0 if entry.ends and stack.stops_early else 1.0
    if lay.recompute == "attention":
        if entry.core:
            return float("attention" in stack.recompute_selective)
        if entry.category == "matmul":
            return stack.recompute_products
        return float(entry.name in stack.recompute_selective)
    if lay.recompute == "operations":
        return float(entry.part in lay.recompute_operations)
    return 0.0


def repeated_layers(job: Job, tally: Tally) -> Number:
    """Which share of the layers like this one is recomputed."""
    lay = job.layout
    if lay.recompute != "budget":
        return 1.0 / lay.recompute_every
    whole = sum(entry.saved for entry in tally.entries)
    whole = whole + cast_copies(job, layer_parameters(job, routed=bool(job.model.experts)))
    spared = whole - stream_tokens(job) * job.model.hidden * job.width
    layers = job.model.layers / lay.pipeline
    return np.clip((layers * whole - lay.recompute_budget * 2.0**30) / (layers * spared), 0.0, 1.0)


@dataclass(frozen=True)
class Piece:
    """Seconds by pass and category before the constants, and kernels launched by pass."""

    seconds: list[list[Number]]
    launches: list[Number]

    @classmethod
    def of(cls, tally: Tally, *, repeats: bool = True) -> Piece:
        """The sum of a piece of the network; `repeats` when it is of the kind that may be recomputed."""
        seconds: list[list[Number]] = [[0.0] * len(CATEGORIES) for _ in range(4)]
        launches: list[Number] = [0.0] * 4
        job = tally.job
        share = repeated_layers(job, tally)
        for entry in tally.entries:
            column = CATEGORIES.index(entry.category)
            for to, source in ((FORWARDS, FORWARD), (INPUTS, INPUT), (WEIGHTS, WEIGHT)):
                seconds[to][column] = seconds[to][column] + entry.seconds[source]
                launches[to] = launches[to] + entry.launches[source]
            again = share * repeated(job, entry) if repeats else 0.0
            if np.any(again):
                seconds[RECOMPUTE][column] = seconds[RECOMPUTE][column] + again * entry.seconds[FORWARD]
                launches[RECOMPUTE] = launches[RECOMPUTE] + again * entry.launches[FORWARD]
        return cls(seconds, launches)


def total(pieces: Iterable[tuple[Number, Piece]]) -> Piece:
    """Pieces added up, each so many times."""
    seconds: list[list[Number]] = [[0.0] * len(CATEGORIES) for _ in range(4)]
    launches: list[Number] = [0.0] * 4
    for times, piece in pieces:
        for row, own in zip(seconds, piece.seconds, strict=True):
            for column, value in enumerate(own):
                row[column] = row[column] + times * value
        launches = [a + times * b for a, b in zip(launches, piece.launches, strict=True)]
    return Piece(seconds, launches)


@dataclass(frozen=True)
class Pieces:
    """The four pieces a network is made of."""

    embedding: Piece
    dense: Piece
    routed: Piece | None
    head: Piece

    @classmethod
    def of(cls, job: Job) -> Pieces:
        """Those of a job, per microbatch."""
        routed = bool(job.model.experts)
        plain = not routed or job.model.dense_layers
        dense = Piece.of(layer(job, routed=False)) if plain else None
        mixed = Piece.of(layer(job, routed=True)) if routed else None
        return cls(Piece.of(embedding(job), repeats=False), dense or mixed, mixed, Piece.of(head(job), repeats=False))  # type: ignore[arg-type]

    def stage(self, dense: Number, routed: Number, *, first: Number, last: Number) -> Piece:
        """A stage of so many layers, with the embedding and the head where it has them."""
        parts = [(first, self.embedding), (dense, self.dense), (last, self.head)]
        if self.routed is not None:
            parts.append((routed, self.routed))
        return total(parts)


@dataclass(frozen=True)
class Passes:
    """Seconds of a stage's passes as they really take, and of what."""

    forward: Number
    backward_input: Number
    """With the recomputation before it."""
    backward_weight: Number
    parts: dict[str, Number]
    """All passes together by category of the ledger."""


def passes(job: Job, piece: Piece, constants: Constants) -> Passes:
    """The passes of a stage, with exposed traffic and the host's share, but without ZeRO's and the pipeline's."""
    stack = job.stack
    parts: dict[str, Number] = dict.fromkeys((*CATEGORIES, "host"), 0.0)
    devices, launches = [], [count * constants["launch"] for count in piece.launches]
    for row in piece.seconds:
        own = {name: value * constants[name] for name, value in zip(CATEGORIES, row, strict=True)}
        own["tensor"] = own["tensor"] - np.minimum(stack.tensor_overlap * own["tensor"], own["matmul"])
        if job.layout.context_method == "ring":
            own["context"] = _exposed(own["context"], own["attention"], constants)
        own["expert"] = own["expert"] * (1.0 - stack.expert_overlap)
        for name, value in own.items():
            parts[name] = parts[name] + value
        devices.append(sum(own.values()))
    # The device waits where the host is slower, and a little where the two are near each other; but one that would wait in all
    # is given the passes as one, to replay.
    launched = np.where(sum(launches) < sum(devices), 1.0, 0.0) if stack.replays else 1.0
    results = []
    for device, launch in zip(devices, launches, strict=True):
        host = launched * host_seconds(job, device, launch)
        parts["host"] = parts["host"] + host
        results.append(device + host)
    forward, again, inputs, weights = results
    return Passes(forward, again + inputs, weights, parts)


def host_seconds(job: Job, device: Number, launch: Number) -> Number:
    """How long work on the device waits for its launches."""
    power = ONE_AFTER_THE_OTHER if job.cluster.chip.name == "cpu" else SHARPNESS
    return (device**power + launch**power) ** (1 / power) - device


def _exposed(traffic: Number, work: Number, constants: Constants) -> Number:
    """What is left of traffic that can hide behind work."""
    return np.maximum(traffic - work, constants["exposed"] * traffic)
