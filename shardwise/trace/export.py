"""All ranks on one clock, every span by itself, with the axis of each message: what Perfetto is given to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.ledger import Timeline
from shardwise.trace.answers import Clock
from shardwise.trace.reading.events import Profile
from shardwise.trace.sending.messages import sent
from shardwise.trace.spans.activity import activity
from shardwise.trace.spans.classes import Classified
from shardwise.trace.spans.steps import Chosen
from shardwise.trace.timeline import timeline


def whole_timeline(
    profiles: Sequence[Profile],
    chosen: Mapping[int, Chosen],
    classified: Mapping[int, Classified],
    clocks: Mapping[int, Clock],
    points: int = 0,
) -> Timeline:
    """Everything that ran in the windows, seconds from the first of them, clocks aligned; with `points`, what is shorter than
    one of so many points across is joined with its neighbours."""
    seen = [profile for profile in profiles if profile.rank in clocks]
    absolute = {p.rank: p.base + clocks[p.rank].offset for p in seen}
    origin = min((int(chosen[p.rank].windows.start[0]) + absolute[p.rank] for p in seen), default=0)
    ranks = {}
    for p in seen:
        rows = activity(p, classified[p.rank])
        ranks[p.rank] = (rows, sent(rows), chosen[p.rank].windows)
    return timeline(ranks, {rank: shift - origin for rank, shift in absolute.items()}, points > 0, points)
