"""Schedules that split the backward in two: I, for the input, which the stage before waits for, and W, the deferred weight
gradient, which nobody waits for and which therefore fills the bubble. P is the number of ranks, r a rank; F, I, W and B = I + W
are the times of one stage, of which ZB-V and DualPipeV have two a rank, placed in a V.

ZB-H1 and ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2.1 and 6):

- ZB-H1, m >= P microbatches: bubble (P - 1)(F + I - W), a third of 1F1B's when the three are equal. Every rank holds P
  microbatches, 1F1B's most: rank r has P - r before I, as in 1F1B, and has up to r W deferred. This is for W <= F and W <= I.
- ZB-V, two stages a rank placed in a V, m >= 2P - 1: with F = I = W no rank waits between its first action and its
  last. Every rank holds 2P microbatch-stages, which are P microbatches of a whole rank, 1F1B's most. Rank r starts r F
  after rank 0 and ends r F after it. So where all ranks synchronise after the step, (P - 1) F of bubble remain, half of
  ZB-H1's as a stage is half a rank; the paper removes it by stepping the optimizer without synchronising.

DualPipeV is the V-shaped half of DualPipe (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1, and the
repository deepseek-ai/DualPipe; the halving is Sea AI Lab's "cut-in-half"). In the long middle part a rank pairs the
forward of one of its stages with the backward of the other, so that the communication inside one (of experts, of tensor
parallelism) overlaps with the computation of the other. An F directly followed by the B of another microbatch is such a
pair. Only the ends split the backward into I and W. With m >= 2P microbatches (the repository's table has PP = 2P):

- published bubble: (P - 1)(F&B + B - 3W), where F&B is the time of a pair. The lists attain it, for W <= F <= I, when a
  pair runs as one: starts when both inputs are there and gives both results at its end. Timed as F followed by B the
  bubble is smaller, (P - 1)(F + B - 2W) for W <= I <= F, since the next stage then waits for the F alone;
- every rank holds 2P + 1 microbatch-stages, one more than 1F1B's P microbatches of a whole rank.

Fewer microbatches than a schedule needs are scheduled as part of the regular one; their bubble is larger.
"""

from __future__ import annotations

from collections import defaultdict, deque

from shardwise.schedules.actions import Action, Schedule, keep_microbatches, loop_placement, v_placement


class RankList:
    """The list of one rank, built as a paper describes it: so many of one kind, then so many of another. It counts the microbatches
    of each kind and stage, so that they come in the same order in every kind."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.forwards: defaultdict[int, int] = defaultdict(int)
        self.backwards: defaultdict[int, int] = defaultdict(int)
        self._weights_due: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        """The forward of a stage's next microbatch."""
        self.actions.append(Action("F", stage, self.forwards[stage]))
        self.forwards[stage] += 1

    def backward(self, stage: int) -> None:
        """The backward of a stage's next microbatch, for the input and the weights together."""
        self.actions.append(Action("B", stage, self.backwards[stage]))
        self.backwards[stage] += 1

    def backward_input(self, stage: int) -> None:
        """The backward of a stage's next microbatch for its input; its weight gradient is now due."""
        microbatch = self.backwards[stage]
        self.actions.append(Action("I", stage, microbatch))
        self._weights_due.append(Action("W", stage, microbatch))
        self.backwards[stage] += 1

    def backward_weight(self) -> None:
        """The weight gradient that has been due the longest, of whichever stage."""
        self.actions.append(self._weights_due.popleft())

    def backward_weights(self) -> None:
        """All weight gradients that are due."""
        self.actions.extend(self._weights_due)
        self._weights_due.clear()


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with split backwards, where rank r defers r of its W to the end."""
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
        lists.append(tuple(out.actions))
    kept = tuple(lists) if microbatches == regular else keep_microbatches(lists, microbatches)
    return Schedule("zb-v", kept, v_placement(ranks), microbatches)


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
        for place in range(2 * (rank + 1)):  # 6: no forwards left; the second half defers its W to the end
            back = out.backward if place < rank + 1 else out.backward_input
            back(down if place % 2 else up)
        for _ in range(below):  # 7: the last I come up at the pace of the ranks below
            out.backward_weight()
            out.backward_input(down)
        out.backward_weights()  # 8
        lists.append(tuple(out.actions))
    kept = tuple(lists) if microbatches == regular else keep_microbatches(lists, microbatches)
    return Schedule("dualpipe-v", kept, v_placement(ranks), microbatches)
