"""Which part of each parameter a rank holds: the one table of what the tensor and expert axes cut, and along which dimension.

Sharding (ZeRO) is laid over it by `fully_shard` and needs no table: rows, but of experts whichever dimension is even (`shard.py`).
Making initial weights, saving and counting all read this.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwise.run import LayoutConfig, ModelConfig

_COLUMNS = (
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.kv",
    "ffn.gate",
    "ffn.up",
    "ffn.shared.gate",
    "ffn.shared.up",
)
_ROWS = ("attention.out", "ffn.down", "ffn.shared.down")


@dataclass(frozen=True)
class Split:
    """A parameter is cut over the ranks of `axis` along dimension `dim`, as evenly as whole rows allow."""

    axis: str
    dim: int


def bounds(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """The piece of `length` rows that a rank holds: equal pieces, rounded up, so that the last ranks may hold less."""
    piece = -(-length // ranks)
    return min(rank * piece, length), min((rank + 1) * piece, length)


def splits(model: ModelConfig, layout: LayoutConfig, name: str) -> tuple[Split, ...]:
    """How the parameter `name` is cut. What is not cut over tensor ranks sees only a part of the tokens or heads there, so
    its gradient is a part too and is added over them at the end of a step."""
    parts = name.split(".")
    if len(parts) > 2 and parts[-3:-1] == ["ffn", "experts"]:
        cut: tuple[Split, ...] = (Split("expert", 0),) if layout.expert > 1 else ()
        if layout.tensor > 1 and layout.expert_tensor:
            cut += (Split("tensor", 2 if parts[-1] == "down" else 1),)
        return cut
    if layout.tensor == 1:
        return ()
    if name in ("embed.weight", "head.weight"):
        return (Split("tensor", 0),)
    module, leaf = ".".join(parts[2:-1]), parts[-1]
    if module in ("attention.k", "attention.v") and model.kv_heads < layout.tensor:
        return ()  # fewer heads than ranks: each rank keeps all and uses the rows of one
    if module in _COLUMNS:
        return (Split("tensor", 0),)
    if module in _ROWS and leaf == "weight":
        return (Split("tensor", 1),)
    return ()


def part(value: Tensor, cut: tuple[Split, ...], place: dict[str, tuple[int, int]]) -> Tensor:
    """This rank's part of a whole tensor; `place` gives (ranks, rank) of each axis."""
    for split in cut:
        ranks, rank = place[split.axis]
        start, stop = bounds(value.shape[split.dim], ranks, rank)
        value = value.narrow(split.dim, start, stop - start)
    return value
