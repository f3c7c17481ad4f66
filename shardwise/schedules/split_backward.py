"""Schedules that split the backward in two: I, the input's gradient, which the previous stage waits for, and W, the deferred weight
gradient, which no rank waits for and which therefore fills the bubble. P is the number of ranks, r a rank; F, I, W and B = I + W
are the times of one stage, of which ZB-V has two per rank, placed in a V. DualPipe, which splits some backwards, is in
`dualpipe.py`.

ZB-H1, ZB-V and ZB-2p are of Qi et al. 2023, "Zero Bubble Pipeline Parallelism". ZB-H1 and ZB-V (sections 2.1 and 6):

- ZB-H1, m >= P microbatches: bubble (P - 1)(F + I - W), a third of 1F1B's when the three are equal. Every rank holds P
  microbatches, 1F1B's maximum: rank r has P - r before I, as in 1F1B, and up to r deferred W. This holds for W <= F and W <= I.
- ZB-V, two stages per rank placed in a V, m >= 2P - 1: with F = I = W no rank waits between its first action and its last. Every
  rank holds 2P microbatch-stages, which are P microbatches of a whole rank, 1F1B's maximum. Rank r starts r F after rank 0 and ends
  r F after it. So where all ranks synchronise after the step, (P - 1) F of bubble remain, half of ZB-H1's as a stage is half a
  rank; the paper removes it by stepping the optimizer without synchronising.

ZB-2p (sections 2.2 and 3.1): a rank runs forwards ahead until the first gradient comes back up, 2(P - r) - 1 of them on rank r,
and keeps 2P - 1 microbatches in all, including those whose W is deferred, twice the memory of 1F1B. Within these two limits the
lists follow the paper's heuristic: play the pipeline, and give each idle rank an I where one is ready, else an F, else a W. Each of
the three takes one unit of time here, the case for which the paper draws this schedule by hand (ZB-H2). With m >= 2P - 1:

- waiting between a rank's first and last action: none where F = I = W. Where they differ ZB-H2's is (P - 1)(F + I - 2W);
- rank r starts and ends r F after rank 0: as with ZB-V, (P - 1) F of bubble remain where all ranks synchronise after the step;
- rank r holds 2(P - r) - 1 microbatches before I and 2r between I and W, 2P - 1 in all; the paper's limit is 2P.

With fewer microbatches than a schedule needs, the regular one is scheduled and the surplus left out; the bubble is larger.
"""

from __future__ import annotations

from collections import defaultdict, deque

from shardwise.schedules.actions import Action, Schedule, keep_microbatches, loop_placement, v_placement


class RankList:
    """The list of one rank, built as a paper describes it: a number of one kind, then a number of another. It counts the
    microbatches of each kind and stage, so that they come in the same order in every kind."""

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
        """The weight gradient that has been due the longest, of any stage."""
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
            # Towards the end the ranks above have no forwards left and run an I every I + W. Skipping r of the W here
            # keeps up with them, and the skipped W fill the time in which their last I come up to rank 0.
            if not steady - 1 - rank <= microbatch < steady - 1:
                out.backward_weight()
        out.backward_weights()
        lists.append(tuple(out.actions))
    return Schedule("zb-h1", tuple(lists), loop_placement(ranks, 1), microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Down the ranks and up again, alternating between both stages of a rank, with W right after I until the end."""
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
    return Schedule("zb-v", keep_microbatches(lists, microbatches, regular), v_placement(ranks), microbatches)


def zb_2p(ranks: int, microbatches: int) -> Schedule:
    """Forwards run as far ahead as a microbatch takes down and up again; W runs wherever nothing else can."""
    regular = max(microbatches, 2 * ranks - 1)
    lists = [RankList() for _ in range(ranks)]
    done = [0] * ranks  # number of W each rank has done
    none = [0] * (ranks - 1)
    sent = [[regular, *none], [*none, regular]]  # forwards and gradients that each rank has received
    while min(done) < regular:
        given = [list(each) for each in sent]  # results of this unit of time are available in the next
        for rank, out in enumerate(lists):
            forwards, backwards = out.forwards[rank], out.backwards[rank]
            if backwards < min(forwards, given[1][rank]):
                out.backward_input(rank)
                if rank:
                    sent[1][rank - 1] += 1
            elif (
                forwards < given[0][rank]
                and forwards - backwards < 2 * (ranks - rank) - 1
                and forwards - done[rank] < 2 * ranks - 1
            ):
                out.forward(rank)
                if rank < ranks - 1:
                    sent[0][rank + 1] += 1
            elif done[rank] < backwards:
                out.backward_weight()
                done[rank] += 1
    kept = keep_microbatches((out.actions for out in lists), microbatches, regular)
    return Schedule("zb-2p", kept, loop_placement(ranks, 1), microbatches)
