"""The requests of a load, drawn from a seed: when each comes, how long it is, and the tokens of its prompt.

Whoever plans a load, whoever gives it to an engine and whoever sends it to a server draw it here, so that all three speak of the
same requests.
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
    """So many requests at random moments, `rate` a second (Poisson); without a rate all are due at once, as those of clients that
    wait for their answers are sent when there is room. The first ones are the same however many are drawn."""
    moments, now, due = random.Random(f"{seed} moments"), 0.0, []
    for _ in range(count):
        due.append(now)
        now += moments.expovariate(rate) if rate else 0.0
    return [LoadRequest(*each) for each in zip(due, input.draw(count, seed), output.draw(count, seed + 1), strict=True)]


def prompt_tokens(seed: int, number: int, length: int, vocab: int) -> list[int]:
    """The prompt of a request: random tokens."""
    return random.Random(f"{seed} {number}").choices(range(vocab), k=length)
