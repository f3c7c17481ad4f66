"""Traffic and state of replicas that compress their gradients, or synchronize rarely, averaged over the steps after the warm-up.
The formulas are those in the headings of `parallel/compress` and `parallel/outer.py`. A part of `traffic.py` and `state.py`."""

from __future__ import annotations

import math
from collections import Counter

from shardwise.plan.cost.compression import SUM
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
    """`compress/exchange.py`: this rank's gradients, summed over replicas; or `outer.py`, once in `sync_every` steps."""
    planned, lay = wire.planned, wire.planned.run.layout
    if not lay.replicas_apart or planned.size("replicate") == 1:
        return
    if lay.sync_every == 1:
        _added_up(wire, _shapes(planned))
        return
    rarely = Wire(planned, wire.sent, every=lay.sync_every)
    for fragment in range(lay.sync_fragments):
        _added_up(rarely, _shapes(planned, fragment))
    # Replicas also agree on whether to stop, whenever they synchronize.
    spoken = {fragment * lay.sync_every // lay.sync_fragments for fragment in range(lay.sync_fragments)}
    rarely.all_reduce("replicate", SUM, times=len(spoken))


def _added_up(wire: Wire, shapes: Counter[tuple[int, ...]]) -> None:
    """Tensors summed over replicas, given as the count of each shape."""
    planned, lay = wire.planned, wire.planned.run.layout
    width = planned.high_width
    if lay.compress in BITS:
        ranks = planned.size("replicate")
        share = -(-sum(count * blocks_of(math.prod(shape), lay.compress) for shape, count in shapes.items()) // ranks)
        messages = 1 if share else 0
        wire.all_to_all("replicate", ranks * share * block_bytes(lay.compress), messages=messages)
        wire.all_gather("replicate", share * block_bytes(lay.compress), messages=messages)
    elif lay.compress == "topk":
        count = sum(count * kept(math.prod(shape), lay.compress_density) for shape, count in shapes.items())
        wire.all_gather("replicate", count * (width + INDEX), messages=2 if count else 0)
    elif lay.compress == "powersgd":
        low = {shape: count for shape, count in shapes.items() if has_low_rank(shape, lay.compress_rank)}
        for side in (1, 2):  # P has the matrix's rows, Q its columns
            size = sum(n * as_matrices(s)[0] * as_matrices(s)[side] * lay.compress_rank for s, n in low.items())
            wire.all_reduce("replicate", size * width, messages=1 if size else 0)
        rest = sum(n * math.prod(shape) for shape, n in shapes.items() if shape not in low)
        wire.all_reduce("replicate", rest * width, messages=1 if rest else 0)
    else:
        whole = sum(n * math.prod(shape) for shape, n in shapes.items())
        wire.all_reduce("replicate", whole * width, messages=1 if whole else 0)


def _shapes(planned: PlannedRank, fragment: int | None = None) -> Counter[tuple[int, ...]]:
    """The shapes of the gradients that a rank holds, without padding, and the count of each; of one fragment or of all."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for stage in planned.stages:
        held = [(layer, planned.layer_parameters(planned.run.model.is_moe(layer))) for layer in stage.layers]
        fragments = planned.run.layout.sync_fragments
        inside = (p for layer, own in held if fragment is None or layer % fragments == fragment for p in own)
        outside = planned.outer_parameters(stage) if not fragment else ()
        for parameter in (*inside, *outside):
            shape = parameter.own_shape(*planned.sharding(parameter))
            if parameter.learns and 0 not in shape:
                shapes[shape] += 1
    return shapes


def state_bytes(planned: PlannedRank, parameter: PlannedParameter) -> int:
    """Bytes that a rank keeps for the gradient of a parameter: the unsent error, and what the next exchange starts from."""
    lay, shape = planned.run.layout, parameter.own_shape(*planned.sharding(parameter))
    numel = math.prod(shape)
    if planned.size("replicate") == 1 or not numel:
        return 0
    if lay.sync_every > 1:  # the weights of the last exchange, and the outer momentum
        return numel * planned.high_width * (1 + bool(lay.outer_optimizer == "nesterov" and lay.outer_momentum))
    if lay.compress not in KEEPS_ERROR:
        return 0
    values = numel
    if lay.compress == "topk" and lay.compress_momentum:
        values += numel
    if lay.compress == "powersgd":
        matrices, _, columns = as_matrices(shape)
        values = numel + matrices * columns * lay.compress_rank if has_low_rank(shape, lay.compress_rank) else 0
    return values * planned.high_width
