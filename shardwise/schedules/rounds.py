"""The schedules that plans go by, and how few rounds of one say all there is to say of a longer one.

A round is as many microbatches as the pipeline has ranks. Long schedules repeat their middle, so questions about order and
occupancy have the same answer after a few rounds, plus the microbatches that do not fill one.
"""

from __future__ import annotations

from functools import lru_cache

from shardwise.schedules import Schedule, make_schedule


@lru_cache(maxsize=512)
def cached_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """`make_schedule`, remembered."""
    return make_schedule(name, ranks, microbatches, chunks)


def fewer_rounds(ranks: int, microbatches: int, rounds: int) -> int:
    """Microbatches of so many rounds and what is over, or all where they are not more."""
    return min(microbatches, rounds * ranks + microbatches % ranks)
