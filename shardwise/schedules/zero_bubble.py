"""Zero-bubble schedules ZB-H1 and ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2.1 and 6).

The backward is cut in two: I, for the input, which the stage before waits for, and W, for the weights, which nobody
waits for and which therefore fills the bubble. With P ranks, rank r, F, I and W the times of one stage:

- ZB-H1, m >= P microbatches: bubble (P - 1)(F + I - W), a third of 1F1B's when the three are equal. Every rank holds P
  microbatches, 1F1B's most: rank r has P - r before I, as in 1F1B, and owes up to r W. This is for W <= F and W <= I.
- ZB-V, two stages a rank placed in a V, m >= 2P - 1: with F = I = W no rank waits between its first action and its
  last. Every rank holds 2P microbatch-stages, which are P microbatches of a whole rank, 1F1B's most. Rank r starts r F
  after rank 0 and ends r F after it. So where all ranks must meet after the step, (P - 1) F of bubble remain, half of
  ZB-H1's as a stage is half a rank; the paper does away with it by stepping the optimizer without meeting.

Fewer microbatches than that are scheduled as part of the regular schedule; their bubble is larger.
"""

from __future__ import annotations

from shardwise.schedules.actions import Schedule, keep_microbatches, loop_placement, v_placement
from shardwise.schedules.rank_list import RankList


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with split backwards, where rank r puts off r of its W to the end."""
    lists = []
    for rank in range(ranks):
        out = RankList()
        warmup = min(ranks - rank - 1, microbatches)
        steady = microbatches - warmup
        for _ in range(warmup):
            out.forward(rank)
        for microbatch in range(microbatches):
            if microbatch < steady:
                out.forward(rank)
            out.backward_input(rank)
            # Towards the end the ranks above have no forwards left and take an I every I + W. Leaving out r W here keeps
            # up with them, and what is left out fills the time in which their last I come up to rank 0.
            if not steady - 1 - rank <= microbatch < steady - 1:
                out.backward_weight()
        out.backward_weights()
        lists.append(tuple(out.actions))
    return Schedule("zb-h1", tuple(lists), loop_placement(ranks, 1), microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Down the ranks and up again, with both stages of a rank in turn and W right after I until the end."""
    regular = max(microbatches, 2 * ranks - 1)
    lists = []
    for rank in range(ranks):
        out = RankList()
        down, up = rank, 2 * ranks - 1 - rank
        below = ranks - rank - 1

        def back(stage: int, out: RankList = out) -> None:
            out.backward_input(stage)
            out.backward_weight()

        for _ in range(2 * below + 1):  # until the first microbatch is back from the bottom of the V
            out.forward(down)
        for _ in range(rank):  # until it has gone up to rank 0, which turns it round
            out.forward(up)
            out.forward(down)
        for _ in range(below + 1):  # it comes down again while the memory is full
            out.forward(up)
            back(up)
        while out.forwards[up] < regular:
            if out.forwards[down] < regular:
                out.forward(down)
            back(down)
            out.forward(up)
            back(up)
        for _ in range(rank):  # no forwards left: I only, so that the ranks above are not kept waiting
            out.backward_input(down)
            out.backward_input(up)
        for _ in range(below + 1):
            back(down)
        out.backward_weights()
        lists.append(out.actions)
    return Schedule("zb-v", keep_microbatches(lists, microbatches), v_placement(ranks), microbatches)
