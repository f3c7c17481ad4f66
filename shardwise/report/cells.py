"""Layout on a grid of characters: the width of each part of a bar, and the span in each cell of a timeline. Arithmetic only;
`terminal` draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from shardwise.ledger import Span

OWNER_LETTERS = {"parameters": "P", "gradients": "G", "optimizer": "O", "activations": "A", "logits": "L",
                 "gathered": "Z", "buffers": "B", "workspace": "W"}  # fmt: skip
"""Letters of memory owners when there is no colour; Z is ZeRO's gathered parameters."""

KIND_LETTERS = {"forward": ">", "recompute": "r", "backward": "<", "backward_input": "i", "backward_weight": "w",
                "optimizer": "o", "matmul": "m", "attention": "a", "memory": "y", "host": "h", "replicate": "R",
                "shard": "S", "context": "C", "tensor": "T", "pipeline": "P", "expert": "E", "data": "d",
                "checkpoint": "k", "offload": "H", "other": "x"}  # fmt: skip
"""Letters of passes and categories when there is no colour: compute in lower case, communication in capitals."""

IDLE = "."


@dataclass(frozen=True)
class CellRange:
    """Adjacent cells that show one span, or idle time."""

    span: Span | None
    cells: int


def stacked(values: Sequence[float], scale: float, width: int) -> list[int]:
    """Cells for each part of a bar that is `width` long at `scale`. Cumulative sums are rounded, not parts, so that the total
    length of the bar is right."""
    if not scale > 0 or not isfinite(scale):
        return [0] * len(values)
    cells, so_far, used = [], 0.0, 0
    for value in values:
        so_far += value
        end = min(width, round(so_far / scale * width))
        cells.append(max(0, end - used))
        used = max(used, end)
    return cells


def paint(spans: Iterable[Span], seconds: float, width: int) -> list[CellRange]:
    """One row of a timeline. A cell shows compute if compute fills at least half of it, else the communication that does, else
    idle: overlapped communication costs no time."""
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


def _joined(shown: Sequence[Span | None]) -> list[CellRange]:
    ranges: list[CellRange] = []
    for span in shown:
        if ranges and ranges[-1].span is span:
            ranges[-1] = CellRange(span, ranges[-1].cells + 1)
        else:
            ranges.append(CellRange(span, 1))
    return ranges


def caption(span: Span, cells: int) -> str:
    """The microbatch's number, "" if it does not fit."""
    number = str(span.microbatch)
    return number if span.microbatch >= 0 and len(number) <= cells else ""


def rows_shown(ranks: Sequence[int], most: int) -> list[int | None]:
    """The ranks to draw: all, or the first and last that fit, with None for the omitted ones between."""
    if len(ranks) <= most:
        return list(ranks)
    head = (most - 1) // 2 + (most - 1) % 2
    return [*ranks[:head], None, *ranks[len(ranks) - (most - 1 - head) :]]
