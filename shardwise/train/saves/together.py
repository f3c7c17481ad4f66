"""What ranks tell each other about saving: one short sentence and a few numbers each, all at once.

Numbers and text travel as tensors, so nothing received can be more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.parallel.mesh import Mesh

TEXT = 480  # bytes of a sentence that travel


@dataclass(frozen=True)
class Words:
    """What one rank said: a sentence, "" when there is nothing to say, and numbers."""

    text: str
    numbers: tuple[int, ...]


def tell(mesh: Mesh, text: str = "", numbers: Sequence[int] = ()) -> list[Words]:
    """Tell all ranks, and hear all of them. Every rank must call it, with as many numbers as the others."""
    if mesh.layout.world == 1:
        return [Words(text, tuple(numbers))]
    message = text.encode()[:TEXT]
    mine = torch.zeros(TEXT + 8 * len(numbers), dtype=torch.uint8)
    mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else mine[:0]
    mine[TEXT:] = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    heard = [torch.empty_like(mine) for _ in range(mesh.layout.world)]
    dist.all_gather(heard, mine)
    return [
        Words(
            bytes(each[:TEXT].tolist()).rstrip(b"\0").decode(errors="replace"),
            tuple(each[TEXT:].clone().view(torch.int64).tolist()),
        )
        for each in heard
    ]


def first_text(words: Sequence[Words]) -> str:
    """The sentence of the first rank that said one."""
    return next((w.text for w in words if w.text), "")
