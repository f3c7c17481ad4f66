"""How gradients are compressed between ranks: what trainer and plan must both know of each method. No torch.

A quantised method sends values in blocks, each with a float32 scale. A tensor is padded to its own full blocks, so its values do
not depend on the tensors sent with it: ranks that hold copies of a parameter get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BITS = {"int8": 8, "fp8": 8, "int4": 4, "onebit": 1}
"""Bits per value, by quantised method."""
BLOCK = {"int8": 256, "fp8": 256, "int4": 64, "onebit": 256}
"""Values that share a scale: fewer where the largest of them has only a few steps."""
SCALE = 4
"""Bytes of a scale."""
INDEX = 4
"""Bytes of an index into a tensor, for top-k."""
KEEPS_ERROR = ("onebit", "powersgd", "topk")
"""Methods with error feedback: the part of a gradient not sent in one step is added in the next."""


def values_kept(method: str, momentum: float) -> int:
    """Values kept between steps for each gradient value; PowerSGD's factors are few in comparison."""
    return 0 if method not in KEEPS_ERROR else 2 if method == "topk" and momentum else 1


def block_bytes(method: str) -> int:
    """Bytes of a block on the wire."""
    return BLOCK[method] * BITS[method] // 8 + SCALE


def blocks_of(numel: int, method: str) -> int:
    """The number of blocks of a tensor, padded."""
    return -(-numel // BLOCK[method])


def share_of_blocks(numels: Sequence[int], ranks: int, method: str) -> int:
    """Blocks that each rank reduces, for tensors of these sizes: the same number on every rank, the last ones padded with empty
    blocks."""
    return -(-sum(blocks_of(numel, method) for numel in numels) // ranks)


def kept(numel: int, density: float) -> int:
    """Values of a tensor that top-k sends."""
    return min(numel, math.ceil(numel * density))


def fragment_of(name: str, fragments: int) -> int:
    """The fragment of a parameter: layers take turns, like Streaming DiLoCo's strided fragments; parameters outside of the layers
    belong to the first fragment."""
    layer = name.removeprefix("layers.").partition(".")[0]
    return int(layer) % fragments if name.startswith("layers.") else 0


def is_due(step: int, fragment: int, fragments: int, every: int) -> bool:
    """Whether a fragment is exchanged after a step, counted from 1. Each is exchanged once in `every` steps, evenly spaced."""
    return (step - fragment * every // fragments) % every == 0


def as_matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """(matrices, rows, columns) of a tensor as PowerSGD sees it: experts are a stack of matrices."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def has_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether PowerSGD sends two factors of a tensor: only if they have fewer values than the tensor."""
    _, rows, columns = as_matrices(shape)
    return len(shape) > 1 and rank * (rows + columns) < rows * columns
