"""1F1B (PipeDream-flush, Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training") and interleaved 1F1B
(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM").

A rank runs forwards until its first backward can start, then alternates one forward with one backward, so that a
microbatch's activations are freed as soon as possible. With P ranks, rank r, m >= P microbatches, F and B the times of one stage:

- 1F1B: bubble (P - 1)(F + B) as in GPipe; rank r holds P - r microbatches, whatever m is.
- Interleaved, v stages a rank placed round-robin: bubble (P - 1)(F + B), a v-th of that, since a stage is a v-th of
  a rank's layers; rank r holds 2(P - r - 1) + (v - 1) G + 1 microbatch-stages, at most m v; v times the messages.

G is the size of the groups in which microbatches visit a rank's stages. The paper has G = P and needs m to divide by P.
Here m is divided evenly over floor(m / P) groups, of G = ceil(m / floor(m / P)) or one less: no group is shorter than the
ring, so the bubble stays what it is above for every m >= P, and G = P where P divides m.
"""

from __future__ import annotations

from shardwise.schedules.actions import Action, Kind, Schedule, loop_placement


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs P - r - 1 forwards, then alternates."""
    lists = []
    for rank in range(ranks):
        forward = [_action("F", rank, microbatch) for microbatch in range(microbatches)]
        backward = [_action("B", rank, microbatch) for microbatch in range(microbatches)]
        lists.append(_alternate(forward, backward, warmup=ranks - rank - 1))
    return Schedule("1f1b", tuple(lists), loop_placement(ranks, 1), microbatches)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` stages a rank: a group of microbatches goes through one of them, then through the next."""
    if chunks == 1:
        plain = one_forward_one_backward(ranks, microbatches)
        return Schedule("interleaved", plain.ranks, plain.placement, microbatches)
    groups, size = _groups(ranks, microbatches)
    visits = [(chunk, microbatch) for group in groups for chunk in range(chunks) for microbatch in group]
    lists = []
    for rank in range(ranks):
        forward = [_action("F", rank + ranks * chunk, microbatch) for chunk, microbatch in visits]
        backward = [_action("B", rank + ranks * (chunks - 1 - chunk), microbatch) for chunk, microbatch in visits]
        # Two for each rank below: in the time a microbatch takes down to the last rank and its gradient back up.
        lists.append(_alternate(forward, backward, warmup=2 * (ranks - rank - 1) + (chunks - 1) * size))
    return Schedule("interleaved", tuple(lists), loop_placement(ranks, chunks), microbatches)


def _groups(ranks: int, microbatches: int) -> tuple[list[list[int | None]], int]:
    """Microbatches divided evenly into groups no shorter than the ring, each padded with None to one size.

    The padding is scheduled like any microbatch and left out afterwards. So the pace is that of a regular schedule, which has
    no deadlock, and leaving out whole microbatches cannot cause one.
    """
    count = max(1, microbatches // ranks)
    shortest, longer = divmod(microbatches, count)
    size = max(ranks, shortest + (longer > 0))
    groups: list[list[int | None]] = []
    first = 0
    for group in range(count):
        last = first + shortest + (group < longer)
        groups.append([*range(first, last), *[None] * (size - (last - first))])
        first = last
    return groups, size


def _action(kind: Kind, stage: int, microbatch: int | None) -> Action | None:
    return None if microbatch is None else Action(kind, stage, microbatch)


def _alternate(forward: list[Action | None], backward: list[Action | None], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forward))
    paced = forward[:warmup]
    for pair in zip(forward[warmup:], backward, strict=False):
        paced += pair
    paced += backward[len(forward) - warmup :]
    return tuple(action for action in paced if action is not None)
