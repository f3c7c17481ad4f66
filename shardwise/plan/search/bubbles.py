"""The cost of a pipeline schedule, as closed forms over arrays: the makespan from the first forward to the last backward, and how
many microbatches a rank holds. The search screens with these; the layouts it ranks are simulated action by action.

The formulas are those at the top of each file of `schedules/`, with forward, backward-input and backward-weight separate. The cases
that the papers leave open (few microbatches, passes of different length in the V-shaped schedules, transfers that take time) were
fitted to simulated schedules. Unequal stages enter by the busiest rank, which sets the pace, and by the mean, which sets the
bubble. tests/plan/test_search.py compares both with the simulated schedule: the time to 12%, microbatches in flight exactly.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardwise.run.axes import ASYNCHRONOUS, BIDIRECTIONAL, HOLDS_ALL, LOOPED, SPLIT_BACKWARD, V_SHAPED
from shardwise.schedules import cached_schedule, peak_activations

Number = Any
_bpipe = partial(cached_schedule, "bpipe", chunks=1)


class Pace(NamedTuple):
    """Seconds of one microbatch on a pipeline."""

    ranks: int
    chunks: int
    """Stages on each rank."""
    forward: Number
    """Of a mean stage, like the two backward passes below."""
    backward_input: Number
    backward_weight: Number
    busiest: Number
    """All passes of the stages of the busiest rank."""
    hop: Number
    """A transfer between two stages."""


def makespan(schedule: str, pace: Pace, microbatches: Number) -> Number:
    """Seconds from the first forward to the last backward, by the schedule's name."""
    work = microbatches * pace.busiest / (2 if schedule in BIDIRECTIONAL and pace.ranks > 1 else 1)
    if pace.ranks == 1:
        return work
    bubble, transfers = _BUBBLES[schedule](pace, microbatches)
    # While the busiest rank works longer than the mean, others fill their bubble.
    stage = pace.forward + pace.backward_input + pace.backward_weight
    return work + np.maximum(bubble - (pace.busiest - pace.chunks * stage), 0.0) + transfers


def least_makespan(
    schedule: str, ranks: int, chunks: int, microbatches: Number, work: Number, forward: Number
) -> Number:
    """A lower bound on the makespan, given the seconds of a microbatch on the mean rank (`work`) and of its forward pass: the work
    of all microbatches, and the part of the bubble that does not depend on the ratio of the passes. A busier rank does not lower
    it: its extra work takes at least as long as the bubble that this work fills."""
    m, p = microbatches, ranks
    if schedule in BIDIRECTIONAL and p > 1:
        return m / 2 * work
    if schedule in LOOPED:
        fewer = np.minimum(m, p)
        return (m + (p - fewer) + (fewer - 1) / chunks) * work
    if schedule in SPLIT_BACKWARD:  # in V-shaped schedules a rank has two stages
        return m * work + (p - 1) / (2 if schedule in V_SHAPED else 1) * forward
    return (m + p - 1) * work


def _one_forward_one_backward(pace: Pace, m: Number) -> tuple[Number, Number]:
    """(P - 1)(F + B). A microbatch's round trip through the ranks also has to fit in the time of the P microbatches in flight."""
    p, stage = pace.ranks, pace.forward + pace.backward_input + pace.backward_weight
    way = 2 * (p - 1) * pace.hop
    late = np.maximum(stage + way / p - pace.busiest, 0.0)
    return (p - 1) * stage, way + np.maximum(m - p, 0) * late


def _all_forward(pace: Pace, m: Number) -> tuple[Number, Number]:
    """As 1F1B, but no forward waits for the backward of an earlier microbatch."""
    p, stage = pace.ranks, pace.forward + pace.backward_input + pace.backward_weight
    return (p - 1) * stage, 2 * (p - 1) * pace.hop


def _looped(pace: Pace, m: Number) -> tuple[Number, Number]:
    """1/v of the 1F1B bubble, since a stage is 1/v of a rank's layers. If there are fewer microbatches than ranks, a rank waits in
    every round for the first one to come back."""
    p, v = pace.ranks, pace.chunks
    stage = pace.forward + pace.backward_input + pace.backward_weight
    fewer = np.minimum(m, p)
    return stage * ((p - fewer) * v + fewer - 1), 2 * (v * p - 1) * pace.hop


def _breadth_first(pace: Pace, m: Number) -> tuple[Number, Number]:
    """As looped, but the microbatches beyond one per rank hide the transfers from the last rank to the first."""
    p, v = pace.ranks, pace.chunks
    spare = np.maximum(m - p, 0) * pace.forward
    bubble, transfers = _looped(pace, m)
    return bubble, transfers - 2 * (v - 1) * np.minimum(p * pace.hop, spare)


def _zb_h1(pace: Pace, m: Number) -> tuple[Number, Number]:
    """(P - 1)(F + I - W): weight-gradient passes fill the bubble, one per microbatch."""
    p, f, i, w = pace.ranks, pace.forward, pace.backward_input, pace.backward_weight
    filled = np.minimum(m - 1, p - 1)
    bubble = np.maximum((p - 1) * (f + i) - filled * w, (p - 1) * f)
    way = 2 * (p - 1) + 2 * np.clip(m - 2, 0, p - 1)
    late = np.maximum(f + i + 2 * (p - 1) / p * pace.hop - pace.busiest, 0.0)
    return bubble, way * pace.hop + np.maximum(m - p, 0) * late


def _zb_2p(pace: Pace, m: Number) -> tuple[Number, Number]:
    """A rank waits (P - 1)(F + I - 2W), but at least the (P - 1) F by which the last rank begins and ends later. Few microbatches
    fill less of the bubble."""
    p, f, i, w = pace.ranks, pace.forward, pace.backward_input, pace.backward_weight
    filled = np.minimum(m - 1, 2 * (p - 1))
    bubble = np.maximum((p - 1) * (f + i) - filled * w, (p - 1) * f)
    way = 2 * (p - 1) + 2 * np.clip(m - 2, 0, p - 1)
    return bubble, way * pace.hop


def _zb_v(pace: Pace, m: Number) -> tuple[Number, Number]:
    """(P - 1) F where the three passes take the same time. Otherwise the longest of F, I and 2 (I - W) replaces F."""
    p, f, i, w = pace.ranks, pace.forward, pace.backward_input, pace.backward_weight
    regular = (p - 1) * np.maximum(np.maximum(f, i), 2 * (i - w))
    few = 2 * (p - 1) * (f + i) - (m - 1) * (f + np.minimum(f, i))
    return np.maximum(regular, few), 5 * (p - 1) * pace.hop


def _dualpipe_v(pace: Pace, m: Number) -> tuple[Number, Number]:
    """(P - 1)(F + B - 2W), and more where I is longer than F, since paired passes then differ in length."""
    p, f, i, w = pace.ranks, pace.forward, pace.backward_input, pace.backward_weight
    regular = (p - 1) * (np.maximum(f + i - w, f) + np.maximum(i - 1.15 * f, 0.0))
    few = (p - 1) * (2 * (f + i) + w) - (m - 1) * (f + np.minimum(f, i))
    return np.maximum(regular, few), 5 * (p - 1) * pace.hop


def _dualpipe(pace: Pace, m: Number) -> tuple[Number, Number]:
    """As DualPipeV on half of the ranks with half of the microbatches. Infinite for an odd number, which no legal layout has."""
    bubble, transfers = _dualpipe_v(pace._replace(ranks=pace.ranks // 2), m // 2)
    return np.where(m % 2, np.inf, bubble), transfers


_BUBBLES = {
    "1f1b": _one_forward_one_backward,
    "bpipe": _one_forward_one_backward,
    "pipedream": _one_forward_one_backward,
    "pipedream-2bw": _one_forward_one_backward,
    "gpipe": _all_forward,
    "interleaved": _looped,
    "breadth-first": _breadth_first,
    "zb-h1": _zb_h1,
    "zb-2p": _zb_2p,
    "zb-v": _zb_v,
    "dualpipe-v": _dualpipe_v,
    "dualpipe": _dualpipe,
}


def in_flight(schedule: str, ranks: int, chunks: int, rank: int, microbatches: Number) -> Number:
    """The most microbatches a rank holds at a time, each weighted by the share of the rank's stages that hold it."""
    m, p, v = microbatches, ranks, chunks
    if p == v == 1:
        return np.ones_like(m)
    if schedule in HOLDS_ALL:
        return m
    if schedule in ("1f1b", *ASYNCHRONOUS) or (schedule == "interleaved" and v == 1):
        return np.minimum(m, p - rank)
    if schedule == "bpipe":
        return np.vectorize(lambda count: peak_activations(_bpipe(p, count))[rank], otypes=[float])(
            np.minimum(m, 4 * p)
        )
    if schedule == "interleaved":
        rounds = np.maximum(m // p, 1)
        group = np.minimum(np.maximum(-(-m // rounds), p), m)
        return np.minimum((2 * (p - rank - 1) + (v - 1) * group + 1) / v, m)
    if schedule == "zb-h1":
        return np.minimum(m, p)
    if schedule == "zb-2p":
        return np.minimum(m, 2 * p - 1)
    if schedule == "dualpipe":
        return in_flight("dualpipe-v", p // 2, v, min(rank, p - 1 - rank), m // 2)
    most = 2 * p + (schedule == "dualpipe-v")
    return np.minimum(np.minimum(2 * m, most), m + rank + 1) / 2


def before_input(schedule: str, ranks: int, rank: int, microbatches: Number) -> Number:
    """How many of the microbatches in flight still have their backward-input to come, with one stage per rank."""
    return np.minimum(microbatches, 2 * (ranks - rank) - 1 if schedule == "zb-2p" else ranks - rank)
