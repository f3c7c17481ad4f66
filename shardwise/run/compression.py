"""How gradients are compressed on their way between ranks: what both the trainer and its plan must know of each method. No torch.

Values of a quantised method travel in blocks, each with a scale in float32. A tensor is padded to whole blocks of its own, so what
becomes of it does not depend on what travels beside it: ranks that hold copies of a parameter get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BITS = {"int8": 8, "fp8": 8, "int4": 4, "onebit": 1}
"""Bits of a value, by quantised method."""
BLOCK = 256
"""Values that share a scale."""
SCALE = 4
"""Bytes of a scale."""
INDEX = 4
"""Bytes of a place in a tensor, of top-k."""
KEEPS_ERROR = ("onebit", "powersgd", "topk")
"""Methods with error feedback: what was not sent in a step is added to the next."""


def values_kept(method: str, momentum: float) -> int:
    """Values kept from step to step for each gradient; PowerSGD's factors are few beside them."""
    return 0 if method not in KEEPS_ERROR else 2 if method == "topk" and momentum else 1


def block_bytes(method: str) -> int:
    """Bytes of a block on the wire."""
    return BLOCK * BITS[method] // 8 + SCALE


def blocks_of(numel: int) -> int:
    """Blocks that a tensor is padded to."""
    return -(-numel // BLOCK)


def share_of_blocks(numels: Sequence[int], ranks: int) -> int:
    """Blocks of tensors of these sizes that each of so many ranks adds up: all get the same number, the last ones empty ones."""
    return -(-sum(map(blocks_of, numels)) // ranks)


def kept(numel: int, density: float) -> int:
    """Values of a tensor that top-k sends."""
    return min(numel, math.ceil(numel * density))


def fragment_of(name: str, fragments: int) -> int:
    """The fragment that a parameter belongs to: layers take turns, as Streaming DiLoCo's strided fragments, and what is outside of
    them goes with the first."""
    layer = name.removeprefix("layers.").partition(".")[0]
    return int(layer) % fragments if name.startswith("layers.") else 0


def is_due(step: int, fragment: int, fragments: int, every: int) -> bool:
    """Whether a fragment is exchanged behind a step, counted from 1. All are once in so many steps, evenly apart."""
    return (step - fragment * every // fragments) % every == 0


def as_matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """(matrices, rows, columns) of a tensor as PowerSGD sees it: experts are a stack of matrices."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def has_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether PowerSGD sends two factors of a tensor: where they are fewer values than itself."""
    _, rows, columns = as_matrices(shape)
    return len(shape) > 1 and rank * (rows + columns) < rows * columns
