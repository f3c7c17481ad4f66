"""The schedules that plans go by, and how few rounds of one say all there is to say of a longer one.

A round is as many microbatches as the pipeline has ranks. Long schedules repeat their middle. So questions about order and
microbatches in flight have the same answer after a few rounds, plus the microbatches that do not fill one.
"""

from __future__ import annotations

from functools import lru_cache

from shardwise.schedules import Schedule, make_schedule


@lru_cache(maxsize=512)
def cached_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """`make_schedule`, remembered."""
    return make_schedule(name, ranks, microbatches, chunks)


def fewer_rounds(ranks: int, microbatches: int, rounds: int) -> int:
    """Microbatches of so many rounds and the rest that fills none, or all where they are not more."""
    return min(microbatches, rounds * ranks + microbatches % ranks)


def rounds_to_play(ranks: int, microbatches: int) -> tuple[int, int]:
    """Microbatches to play, and how many fewer a second time: the difference is the time that each further round adds. All of them
    once when they are few."""
    most = fewer_rounds(ranks, microbatches, 3)
    return (microbatches, 0) if microbatches <= most + ranks else (most, ranks)
