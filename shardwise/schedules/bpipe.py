"""BPipe (Kim et al. 2023, "BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language Models"): 1F1B whose first ranks
hand saved activations to the last ones, which have room, and take them back for the backward pass.

In 1F1B rank r of P holds P - r microbatches, so the first rank holds P and the last one 1. Rank r and rank P - 1 - r are partners,
and hold P + 1 together. Here no rank holds more than K = ceil((P + 2) / 2) (section 3). Two kinds of action are added:

- E evicts the saved activations of a microbatch to the partner; L loads them back. Both are in the lists of both ranks, the one
  that holds the stage and its partner. Neither computes anything;
- a full rank evicts the newest microbatch, which it needs last, so that the fewest are handed over; each goes out and back once;
- E begins before a backward pass and has to end before the next forward pass, which needs the memory; L begins before that forward
  pass and has to end before the microbatch's backward pass. Where transfers are not longer than these passes, the bubble is that of
  1F1B, (P - 1)(F + B).

The partner's side of a transfer is listed where its own passes are at that time, when a backward pass takes twice a forward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from shardwise.schedules.actions import Action, Kind, Schedule
from shardwise.schedules.one_forward_one_backward import one_forward_one_backward
from shardwise.schedules.timing import Cost, time


def max_in_flight(ranks: int) -> int:
    """The most microbatches a rank holds: ceil((P + 2) / 2)."""
    return (ranks + 3) // 2


def bpipe(ranks: int, microbatches: int) -> Schedule:
    """1F1B, with evictions and loads where a rank would hold more than its share."""
    plain = one_forward_one_backward(ranks, microbatches)
    timing = time(plain, Cost.even(ranks))
    lists: list[Sequence[Action]] = list(plain.ranks)
    for rank in range(ranks // 2):
        own, moments = _with_evictions(rank, plain.ranks[rank], timing.start[rank], max_in_flight(ranks))
        lists[rank] = own
        partner = ranks - 1 - rank
        lists[partner] = _merged(plain.ranks[partner], timing.end[partner], moments)
    return replace(plain, name="bpipe", ranks=tuple(map(tuple, lists)), partners=True)


def evictions(ranks: int, rank: int, microbatches: int) -> int:
    """How many microbatches a rank hands to its partner in a step."""
    if min(microbatches, ranks - rank) <= max_in_flight(ranks):
        return 0
    plain = one_forward_one_backward(ranks, microbatches).ranks[rank]
    return len(_with_evictions(rank, plain, [0.0] * len(plain), max_in_flight(ranks))[1]) // 2


def _with_evictions(
    stage: int, plain: Sequence[Action], start: Sequence[float], most: int
) -> tuple[list[Action], list[tuple[float, Action]]]:
    """The list of a rank that evicts, and its evictions and loads with the time at which each begins."""
    out: list[Action] = []
    moments: list[tuple[float, Action]] = []
    here: list[int] = []  # microbatches held, oldest first
    away: list[int] = []

    def hand(kind: Kind, microbatch: int, moment: float) -> None:
        action = Action(kind, stage, microbatch)
        (here if kind == "E" else away).remove(microbatch)
        (away if kind == "E" else here).append(microbatch)
        here.sort()
        out.append(action)
        moments.append((moment, action))

    for at, action in enumerate(plain):
        if action.kind == "F":
            if len(here) == most:  # while the pipeline fills
                hand("E", here[-1], start[at])
            here.append(action.microbatch)
            out.append(action)
            continue
        # The next backward pass needs its microbatch, and a forward pass comes before it.
        following, forward = action.microbatch + 1, at + 1 < len(plain) and plain[at + 1].kind == "F"
        needed = following in away
        if needed and forward and len(here) == most:
            hand("E", here[-1], start[at])
        here.remove(action.microbatch)
        out.append(action)
        if needed:
            hand("L", following, start[min(at + 1, len(plain) - 1)])
    return out, moments


def _merged(plain: Sequence[Action], end: Sequence[float], moments: list[tuple[float, Action]]) -> list[Action]:
    """A partner's list with its side of each transfer, before the pass that it runs, or waits for, at that time."""
    out: list[Action] = []
    before = 0
    for moment, action in sorted(moments, key=lambda one: one[0]):
        at = bisect_right(end, moment)
        out += plain[before:at]
        out.append(action)
        before = at
    return out + list(plain[before:])
