"""DualPipeV: the V-shaped half of DualPipe (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1, and the
repository deepseek-ai/DualPipe; the halving is Sea AI Lab's "cut-in-half").

Two stages a rank, placed in a V. In the long middle part a rank pairs the forward of one of its stages with the
backward of the other, so that the communication inside one (of experts, of tensor parallelism) can hide behind the
computation of the other; an F directly followed by the B of another microbatch is such a pair. Only the ends cut
the backward into I and W.

With P ranks, m >= 2P microbatches, and F, B, W the times of one of the 2P stages (the repository's table has PP = 2P):

- published bubble: (P - 1)(F&B + B - 3W), where F&B is the time of a pair. The lists attain it, for W <= F <= I, when a
  pair runs as one: starts when both inputs are there and gives both results at its end. Timed as F followed by B the
  bubble is smaller, (P - 1)(F + B - 2W) for W <= I <= F, since the next stage then waits for the F alone;
- every rank holds 2P + 1 microbatch-stages, one more than 1F1B's P microbatches of a whole rank.

Fewer than 2P microbatches are scheduled as part of the schedule for 2P; their bubble is larger.
"""

from __future__ import annotations

from shardwise.schedules.actions import Schedule, keep_microbatches, v_placement
from shardwise.schedules.rank_list import RankList


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """The eight parts of the published schedule."""
    regular = max(microbatches, 2 * ranks)
    lists = []
    for rank in range(ranks):
        out = RankList()
        down, up = rank, 2 * ranks - 1 - rank
        below = ranks - rank - 1
        for _ in range(2 * below):  # 1: until the first microbatch is back from the bottom of the V
            out.forward(down)
        for _ in range(rank + 1):  # 2: until it has been turned round at the top
            out.forward(down)
            out.forward(up)
        for _ in range(below):  # 3: I alone, for the ranks below wait for it
            out.backward_input(up)
            out.backward_weight()
            out.forward(up)
        for _ in range(regular - 2 * ranks + rank + 1):  # 4: the pairs
            out.forward(down)
            out.backward(up)
            out.forward(up)
            out.backward(down)
        for _ in range(below):  # 5: no forwards left to send down
            out.backward(up)
            out.forward(up)
            out.backward(down)
        for place in range(2 * (rank + 1)):  # 6: no forwards left; the second half puts off its W to the end
            back = out.backward if place < rank + 1 else out.backward_input
            back(down if place % 2 else up)
        for _ in range(below):  # 7: the last I come up at the pace of the ranks below
            out.backward_weight()
            out.backward_input(down)
        out.backward_weights()  # 8
        lists.append(out.actions)
    return Schedule("dualpipe-v", keep_microbatches(lists, microbatches), v_placement(ranks), microbatches)
