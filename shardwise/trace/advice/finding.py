"""What the rules of the advice share: a finding is made in one place, so that a gain is told in the same way by all, and nothing is
said where it is too small to matter.
"""

from __future__ import annotations

from shardwise.trace.answers import Explanation, Finding

ENOUGH = 0.02
"""Share of a step below which nothing is said."""

HALF = 0.5
"""A cautious part of what could be won: twice the microbatches halve a bubble, and tensor cores multiply several times faster than
single precision."""


def finding(
    answers: Explanation, rule: str, gain: float, title: str, advice: str, evidence: list[str], ranks: list[int]
) -> Finding | None:
    """A finding, unless it is too small to matter."""
    share = gain / answers.step_time if answers.step_time else 0.0
    if share < ENOUGH:
        return None
    hours = 24 * max(answers.world, len(answers.seen)) * min(share, 1.0)
    return Finding(rule, title, advice, tuple(evidence), tuple(ranks), int(gain), share, hours)


def steps_of(answers: Explanation) -> int:
    """Steps looked at."""
    return max(len(answers.steps), 1)


def milliseconds(nanoseconds: float) -> str:
    """For a sentence."""
    return f"{nanoseconds / 1e6:.2f} ms"


def mean(answers: Explanation, of_rank: dict[int, int]) -> float:
    """Of the ranks seen, in one step."""
    return sum(of_rank.values()) / max(len(answers.seen), 1) / steps_of(answers)


def idle_of(answers: Explanation, cause: str) -> tuple[float, list[int]]:
    """Mean idle time of a cause in a step, and the ranks that have more than the mean."""
    of_rank = {rank: causes.get(cause, 0) for rank, causes in answers.idle.items()}
    usual = mean(answers, of_rank)
    return usual, [rank for rank, value in of_rank.items() if value >= usual * steps_of(answers) and value]


def speed(bandwidth: float) -> str:
    """Bytes a second, for a sentence."""
    return f"{bandwidth / 1e9:.1f} GB/s" if bandwidth >= 1e8 else f"{bandwidth / 1e6:.1f} MB/s"
