"""The schedules by name: whether one is legal for a layout, and its action lists.

`legal` is arithmetic on four numbers, for use before anything starts; `make_schedule` raises an error with the same sentences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from shardwise.schedules.actions import Schedule
from shardwise.schedules.all_forward_all_backward import breadth_first, gpipe
from shardwise.schedules.bpipe import bpipe
from shardwise.schedules.dualpipe import dualpipe, dualpipe_v
from shardwise.schedules.one_forward_one_backward import asynchronous, interleaved, one_forward_one_backward
from shardwise.schedules.split_backward import zb_2p, zb_h1, zb_v


class _Family(NamedTuple):
    build: Callable[[int, int, int], Schedule]
    chunks: int
    """Stages per rank by default."""
    any_chunks: bool = False
    even: bool = False
    """Whether the number of ranks must be even."""
    splits: bool = False
    """Whether backward passes are split."""


_FAMILIES: dict[str, _Family] = {
    "gpipe": _Family(lambda ranks, microbatches, _: gpipe(ranks, microbatches), 1),
    "1f1b": _Family(lambda ranks, microbatches, _: one_forward_one_backward(ranks, microbatches), 1),
    "bpipe": _Family(lambda ranks, microbatches, _: bpipe(ranks, microbatches), 1),
    "interleaved": _Family(interleaved, 2, any_chunks=True),
    "breadth-first": _Family(breadth_first, 2, any_chunks=True),
    "zb-h1": _Family(lambda ranks, microbatches, _: zb_h1(ranks, microbatches), 1, splits=True),
    "zb-2p": _Family(lambda ranks, microbatches, _: zb_2p(ranks, microbatches), 1, splits=True),
    "zb-v": _Family(lambda ranks, microbatches, _: zb_v(ranks, microbatches), 2, splits=True),
    "dualpipe-v": _Family(lambda ranks, microbatches, _: dualpipe_v(ranks, microbatches), 2, splits=True),
    "dualpipe": _Family(lambda ranks, microbatches, _: dualpipe(ranks, microbatches), 2, even=True, splits=True),
    "pipedream": _Family(lambda ranks, microbatches, _: asynchronous("pipedream", ranks, microbatches), 1),
    "pipedream-2bw": _Family(lambda ranks, microbatches, _: asynchronous("pipedream-2bw", ranks, microbatches), 1),
}
SCHEDULES = tuple(_FAMILIES)


def legal(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> list[str]:
    """The reasons why this schedule cannot be made, one sentence each; empty when it can."""
    reasons = []
    if ranks < 1:
        reasons.append(f"a pipeline of {ranks} ranks: it needs at least 1")
    if microbatches < 1:
        reasons.append(f"{microbatches} microbatches: a step needs at least 1")
    if chunks is not None and chunks < 1:
        reasons.append(f"{chunks} stages a rank: each rank holds at least 1")
    family = _FAMILIES.get(name)
    if family is None:
        reasons.append(f'no schedule is called "{name}"; there are {", ".join(SCHEDULES)}')
        return reasons
    if family.even and ranks % 2 and not ranks == chunks == 1:
        reasons.append(f"{name} on {ranks} ranks: two ranks hold the same stages, so it needs an even number of them")
    if (
        chunks is not None
        and chunks >= 1
        and chunks != family.chunks
        and not family.any_chunks
        and max(ranks, chunks) > 1
    ):
        holds = "1 stage" if family.chunks == 1 else f"{family.chunks} stages"
        several = "; interleaved and breadth-first take any number" if family.chunks == 1 else ""
        reasons.append(f"{name} holds {holds} on each rank, not {chunks}{several}")
    return reasons


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The action lists of a schedule; `chunks` is the number of stages on each rank. Raises `ValueError` with the reasons."""
    reasons = legal(name, ranks, microbatches, chunks)
    if reasons:
        raise ValueError("; ".join(reasons))
    family = _FAMILIES[name]
    if ranks == chunks == 1 and family.splits:
        return one_forward_one_backward(ranks, microbatches)  # there is no bubble to fill, and a V has no second leg
    return family.build(ranks, microbatches, family.chunks if chunks is None else chunks)


@lru_cache(maxsize=512)
def cached_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """`make_schedule`, cached: plans ask for the same schedule many times."""
    return make_schedule(name, ranks, microbatches, chunks)


def fewer_rounds(ranks: int, microbatches: int, rounds: int) -> int:
    """The microbatches of at most `rounds` full rounds, plus those that do not fill a round.

    A round has one microbatch per pipeline rank. Long schedules repeat their middle, so questions about order and occupancy have
    the same answer after a few rounds. Where microbatches enter at both ends, timing needs a round in each direction: pass twice
    the ranks.
    """
    return min(microbatches, rounds * ranks + microbatches % ranks)


def rounds_to_play(ranks: int, microbatches: int) -> tuple[int, int]:
    """Number of microbatches to play, and how many fewer to play a second time: the difference is the time that each further round
    adds. All of them once when they are few."""
    most = fewer_rounds(ranks, microbatches, 3)
    return (microbatches, 0) if microbatches <= most + ranks else (most, ranks)
