"""Communication by axis and collective: how long, how much of it nothing hid, how many bytes, how fast, and how much of it was
waiting for another rank rather than moving data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.answers import AxisTime, Moved
from shardwise.trace.reading.events import Integers
from shardwise.trace.sending.sent import Sent, axes_of
from shardwise.trace.spans.intervals import Intervals, difference, intersect, total, union


def moved(
    sent: Sent,
    chosen: NDArray[np.bool_],
    wait: Integers,
    matched: NDArray[np.bool_],
    window: Intervals,
    computing: Intervals,
) -> dict[tuple[str, str], Moved]:
    """One rank. `chosen` messages are counted; their time is cut to the window; `wait` and `matched` are for each message."""
    found = {}
    length = sent.end - sent.start
    size, payload = sent.column(lambda d: d.bytes), sent.column(lambda d: d.payload)
    sized = sent.those(lambda d: d.sized)
    for axis, collective in axes_of(sent):
        mine = chosen & sent.those(lambda d: (d.axis, d.collective) == (axis, collective))  # noqa: B023
        if not mine.any():
            continue
        once = mine & sent.first
        busy = intersect(union(sent.start[mine], sent.end[mine]), window)
        found[axis, collective] = Moved(
            messages=int(once.sum()),
            bytes=float(size[once].sum()),
            payload=float(payload[once].sum()),
            sized=int((once & sized).sum()),
            time=total(busy),
            exposed=total(difference(busy, computing)),
            summed=int(length[mine].sum()),
            wait=int(wait[mine].sum()),
            matched=int((mine & matched).sum()),
            timed=int((length - wait)[mine & sized].sum()),
        )
    return found


def axis_times(ranks: Mapping[int, Mapping[tuple[str, str], Moved]], sents: Mapping[int, Sent]) -> tuple[AxisTime, ...]:
    """All ranks: the axes that nothing hid most first."""
    rows = []
    for pair in {pair for of_rank in ranks.values() for pair in of_rank}:
        sizes = [d.size for sent in sents.values() for d in sent.described if (d.axis, d.collective) == pair]
        rows.append(
            AxisTime(*pair, {rank: of[pair] for rank, of in ranks.items() if pair in of}, max(sizes, default=0))
        )
    return tuple(sorted(rows, key=lambda row: (-row.total.exposed, -row.total.time, row.axis, row.collective)))
