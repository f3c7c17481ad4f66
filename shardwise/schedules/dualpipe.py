"""DualPipe and its V-shaped half (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1 and figure 5, and the repository
deepseek-ai/DualPipe). In the long middle part a rank pairs the forward of one of its stages with the backward of the other, so that
the communication inside one (of experts, of tensor parallelism) overlaps with the computation of the other. An F directly followed
by the B of another microbatch is such a pair. Only the ends split the backward into I and W. F, I, W and B = I + W are the times of
a stage, F&B that of a pair.

DualPipe, P ranks, P even: half of the m >= 2P microbatches enter at the first rank and half at the last. Rank r holds stage r of
one direction and stage P - 1 - r of the other, so ranks r and P - 1 - r hold copies of the same parameters; their gradients are
summed before the update. Stages are numbered along the first direction, 0 to P - 1, then the second, P to 2P - 1.

- published bubble: (P/2 - 1)(F&B + B - 3W). The lists attain it, for W <= F <= I, when a pair runs as one: it starts when both
  inputs are there and delivers both results at its end. Timed as F followed by B, the bubble is (P/2 - 1)(F + B - 2W) for W <= I <=
  F, since the next stage then waits only for the F;
- every rank holds P + 1 microbatches, each of one of its stages, one more than 1F1B's maximum.

DualPipeV is DualPipe cut in half (Sea AI Lab's "cut-in-half"): the lists of the first half of 2P ranks, on which the second
direction is the second leg of a V of 2P stages. So parameters are held once, each rank has two stages of half the size, and every
number above holds with 2P instead of P: bubble (P - 1)(F&B + B - 3W), 2P + 1 microbatch-stages.

With fewer microbatches than a schedule needs, the regular one is scheduled and the surplus left out; the bubble is larger.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.schedules.actions import Action, Schedule, keep_microbatches, v_placement
from shardwise.schedules.split_backward import RankList


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """The published lists, on a V."""
    regular = max(microbatches, 2 * ranks)
    lists = [_rank_list(ranks, rank, rank, 2 * ranks - 1 - rank, regular) for rank in range(ranks)]
    return Schedule("dualpipe-v", keep_microbatches(lists, microbatches, regular), v_placement(ranks), microbatches)


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """The published lists: those of the second half of the ranks mirror those of the first."""
    made = Schedule("dualpipe", (), v_placement(ranks), microbatches, directions=2)
    regular = max(len(made.microbatches_of(0)), ranks)
    lists = []
    for rank in range(ranks):
        one, other = rank, 2 * ranks - 1 - rank  # a stage of each direction
        near, far = (one, other) if 2 * rank < ranks else (other, one)
        own = _rank_list(ranks // 2, min(rank, ranks - 1 - rank), near, far, regular)
        lists.append(tuple(_numbered(own, made)))
    return replace(made, ranks=tuple(lists))


def _numbered(actions: tuple[Action, ...], schedule: Schedule) -> list[Action]:
    """The actions with the microbatch numbers of their direction; those beyond the last are left out."""
    numbers = {stage: schedule.microbatches_of(stage) for _, stage, _ in actions}
    return [
        Action(kind, stage, numbers[stage][microbatch])
        for kind, stage, microbatch in actions
        if microbatch < len(numbers[stage])
    ]


def _rank_list(ranks: int, rank: int, near: int, far: int, microbatches: int) -> tuple[Action, ...]:
    """The eight parts of the published schedule, for one rank of a half of the ranks, counted from that half's outer end.
    Microbatches go through `near` on their way in, and through `far` on their way out."""
    out = RankList()
    below = ranks - rank - 1
    for _ in range(2 * below):  # 1: until the first microbatch is on its way out
        out.forward(near)
    for _ in range(rank + 1):  # 2: until it has been turned round at the end
        out.forward(near)
        out.forward(far)
    for _ in range(below):  # 3: only I, since the ranks below wait for it
        out.backward_input(far)
        out.backward_weight()
        out.forward(far)
    for _ in range(microbatches - 2 * ranks + rank + 1):  # 4: the pairs
        out.forward(near)
        out.backward(far)
        out.forward(far)
        out.backward(near)
    for _ in range(below):  # 5: no forwards left on the way in
        out.backward(far)
        out.forward(far)
        out.backward(near)
    for place in range(2 * (rank + 1)):  # 6: no forwards left; the second half defers its W to the end
        back = out.backward if place < rank + 1 else out.backward_input
        back(near if place % 2 else far)
    for _ in range(below):  # 7: the last I come up at the pace of the ranks below
        out.backward_weight()
        out.backward_input(near)
    out.backward_weights()  # 8
    return tuple(out.actions)
