"""The requests of a load, drawn from a seed: when each arrives, its lengths, and the tokens of its prompt.

The planner of a load, the in-process engine benchmark and the HTTP client all draw it here, so that all three use the same
requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from shardwise.run.lengths import Lengths


@dataclass(frozen=True)
class LoadRequest:
    """One request: seconds from the start until it is sent, and tokens of its prompt and answer."""

    due: float
    input: int
    output: int


def draw_load(count: int, rate: float, input: Lengths, output: Lengths, seed: int = 0) -> list[LoadRequest]:
    """`count` requests at random times, `rate` a second (Poisson). Without a rate all are due at once, since clients that wait for
    their answers send the next request when there is room. The first requests are the same whatever the count."""
    moments, now, due = random.Random(f"{seed} moments"), 0.0, []
    for _ in range(count):
        due.append(now)
        now += moments.expovariate(rate) if rate else 0.0
    return [LoadRequest(*each) for each in zip(due, input.draw(count, seed), output.draw(count, seed + 1), strict=True)]


def prompt_tokens(seed: int, number: int, length: int, vocab: int) -> list[int]:
    """The prompt of a request: random tokens."""
    return random.Random(f"{seed} {number}").choices(range(vocab), k=length)
