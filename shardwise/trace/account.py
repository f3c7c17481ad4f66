"""A profile as an account of the ledger, so that it can be laid beside a plan: the slowest rank's step by category, its traffic by
axis and collective, the memory of each rank seen, and what ran when.

Numbers are those of one step, the mean of the steps that were looked at. What a profile does not show stays empty, and the
ledger's comparison leaves it out.
"""

from __future__ import annotations

from shardwise.ledger import AXIS_OF, COLLECTIVES, Account, Timeline, Traffic
from shardwise.trace.answers import Explanation


def account(answers: Explanation, rank: int | None = None, tokens: float = 0.0) -> Account:
    """The account of one rank, by default the one whose steps took longest; `tokens` are those of a step over all ranks."""
    if rank is None:
        rank = max(answers.ranks, key=lambda one: answers.ranks[one]["span"], default=0)
    steps = max(len(answers.steps), 1)
    numbers = answers.categories.get(rank, {})
    breakdown = {name: value / steps / 1e9 for name, value in numbers.items() if value}
    return Account(
        "trace",
        answers.ranks[rank]["span"] / steps / 1e9 if rank in answers.ranks else 0.0,
        tokens,
        breakdown,
        traffic=traffic(answers, rank),
        timeline=Timeline(tuple(s for s in answers.timeline.spans if s.rank == rank), answers.timeline.seconds),
    )


def traffic(answers: Explanation, rank: int) -> Traffic:
    """What one rank put on the wire in a step. A receive is counted where it is sent."""
    size: dict[str, dict[str, float]] = {}
    messages: dict[str, dict[str, float]] = {}
    steps = max(len(answers.steps), 1)
    for row in answers.axes:
        moved = row.ranks.get(rank)
        if moved is None or row.collective not in COLLECTIVES:
            continue
        axis = AXIS_OF.get(row.axis, row.axis)
        for record, value in ((size, moved.bytes), (messages, moved.messages)):
            kinds = record.setdefault(axis, {})
            kinds[row.collective] = kinds.get(row.collective, 0.0) + value / steps
    return Traffic(size, messages)
