"""Quantities on a grid of characters: how many cells each part of a bar gets, and which span each cell of a timeline shows.
Arithmetic only; `terminal` draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from shardwise.ledger import Span

OWNER_LETTERS = {"parameters": "P", "gradients": "G", "optimizer": "O", "activations": "A", "logits": "L",
                 "gathered": "Z", "buffers": "B", "workspace": "W"}  # fmt: skip
"""The letter of an owner where there is no colour; Z is for ZeRO, which gathers."""

KIND_LETTERS = {"forward": ">", "recompute": "r", "backward": "<", "backward_input": "<", "backward_weight": "w",
                "optimizer": "o", "matmul": "m", "attention": "a", "memory": "y", "host": "h", "replicate": "R",
                "shard": "S", "context": "C", "tensor": "T", "pipeline": "P", "expert": "E", "data": "d",
                "checkpoint": "k", "other": "x"}  # fmt: skip
"""The letter of a pass or category where there is no colour: compute in lower case, communication in capitals."""

IDLE = "."


@dataclass(frozen=True)
class Piece:
    """Neighbouring cells that show one span, or idle time."""

    span: Span | None
    cells: int


def stacked(values: Sequence[float], scale: float, width: int) -> list[int]:
    """Cells for each part of a bar that is `width` long at `scale`. Running sums are rounded, not parts, so that the whole bar
    has the right length."""
    if not scale > 0 or not isfinite(scale):
        return [0] * len(values)
    cells, so_far, used = [], 0.0, 0
    for value in values:
        so_far += value
        end = min(width, round(so_far / scale * width))
        cells.append(max(0, end - used))
        used = max(used, end)
    return cells


def paint(spans: Iterable[Span], seconds: float, width: int) -> list[Piece]:
    """One row of a timeline. A cell shows the compute that fills at least half of it, else the communication that does, else
    nothing: overlapped communication costs no time."""
    compute: list[tuple[float, Span | None]] = [(0.0, None)] * width
    traffic = compute.copy()
    busy = [0.0] * width
    for span in spans:
        if span.category == "bubble" or not seconds > 0:
            continue
        start, end = span.start / seconds * width, (span.start + span.seconds) / seconds * width
        best = compute if span.stream == "compute" else traffic
        for cell in range(max(0, int(start)), min(width, ceil(end))):
            cover = min(end, cell + 1) - max(start, cell)
            if span.stream == "compute":
                busy[cell] += cover
            if cover > best[cell][0]:
                best[cell] = (cover, span)
    shown = [
        compute[cell][1] if busy[cell] >= 0.5 else traffic[cell][1] if traffic[cell][0] >= 0.5 else None
        for cell in range(width)
    ]
    return _joined(shown)


def _joined(shown: Sequence[Span | None]) -> list[Piece]:
    pieces: list[Piece] = []
    for span in shown:
        if pieces and pieces[-1].span is span:
            pieces[-1] = Piece(span, pieces[-1].cells + 1)
        else:
            pieces.append(Piece(span, 1))
    return pieces


def caption(span: Span, cells: int) -> str:
    """The microbatch's number where it fits, else nothing."""
    number = str(span.microbatch)
    return number if span.microbatch >= 0 and len(number) <= cells else ""


def rows_shown(ranks: Sequence[int], most: int) -> list[int | None]:
    """The ranks to draw: all, or as many from both ends as fit; None stands for those between."""
    if len(ranks) <= most:
        return list(ranks)
    head = (most - 1) // 2 + (most - 1) % 2
    return [*ranks[:head], None, *ranks[len(ranks) - (most - 1 - head) :]]
