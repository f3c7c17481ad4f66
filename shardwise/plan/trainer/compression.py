"""What replicas that compress their gradients send each other in a step behind the warm-up, and what they keep: the formulas of the
headings of `parallel/compress`. A part of `traffic.py` and `state.py`."""

from __future__ import annotations

import math
from collections import Counter

from shardwise.plan.trainer.rank import PlannedParameter, PlannedRank
from shardwise.plan.trainer.wire import Wire
from shardwise.run.compression import (
    BITS,
    INDEX,
    KEEPS_ERROR,
    as_matrices,
    block_bytes,
    blocks_of,
    has_low_rank,
    kept,
)


def exchange(wire: Wire) -> None:
    """`compress/exchange.py`: the gradients that this rank holds, added up over replicas."""
    planned, lay = wire.planned, wire.planned.run.layout
    if not lay.replicas_apart or planned.size("replicate") == 1:
        return
    shapes = _shapes(planned)
    width = planned.high_width
    if lay.compress in BITS:
        ranks = planned.size("replicate")
        share = -(-sum(count * blocks_of(math.prod(shape)) for shape, count in shapes.items()) // ranks)
        messages = 1 if share else 0
        wire.all_to_all("replicate", ranks * share * block_bytes(lay.compress), messages=messages)
        wire.all_gather("replicate", share * block_bytes(lay.compress), messages=messages)
    elif lay.compress == "topk":
        count = sum(count * kept(math.prod(shape), lay.compress_density) for shape, count in shapes.items())
        wire.all_gather("replicate", count * (width + INDEX), messages=2 if count else 0)
    elif lay.compress == "powersgd":
        low = {shape: count for shape, count in shapes.items() if has_low_rank(shape, lay.compress_rank)}
        for side in (1, 2):  # of P its rows, of Q its columns
            size = sum(n * as_matrices(s)[0] * as_matrices(s)[side] * lay.compress_rank for s, n in low.items())
            wire.all_reduce("replicate", size * width, messages=1 if size else 0)
        rest = sum(n * math.prod(shape) for shape, n in shapes.items() if shape not in low)
        wire.all_reduce("replicate", rest * width, messages=1 if rest else 0)


def _shapes(planned: PlannedRank) -> Counter[tuple[int, ...]]:
    """The shapes of the gradients that a rank holds, without padding, each with how many there are."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for count, parameter in planned.parameters():
        shape = _shape(planned, parameter)
        numel = math.prod(shape)
        if parameter.learns and numel:
            shapes[shape] += count
    return shapes


def _shape(planned: PlannedRank, parameter: PlannedParameter) -> tuple[int, ...]:
    ranks, index = planned.sharding(parameter)
    return parameter.own_shape(ranks, index)


def state_bytes(planned: PlannedRank, parameter: PlannedParameter) -> int:
    """Bytes that a rank keeps for the gradient of a parameter: what was not sent yet, and where the next step starts from."""
    lay, shape = planned.run.layout, _shape(planned, parameter)
    numel = math.prod(shape)
    if planned.size("replicate") == 1 or lay.compress not in KEEPS_ERROR or not numel:
        return 0
    values = numel
    if lay.compress == "topk" and lay.compress_momentum:
        values += numel
    if lay.compress == "powersgd":
        matrices, _, columns = as_matrices(shape)
        values = numel + matrices * columns * lay.compress_rank if has_low_rank(shape, lay.compress_rank) else 0
    return values * planned.high_width
