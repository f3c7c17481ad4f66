"""1F1B (PipeDream-flush, Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training") and interleaved 1F1B
(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM").

A rank runs forwards until its first backward can start, then alternates one forward with one backward, so that a
microbatch's activations are freed as soon as possible. With P ranks, rank r, m >= P microbatches, F and B the times of one stage:

- 1F1B: bubble (P - 1)(F + B) as in GPipe; rank r holds P - r microbatches, whatever m is.
- Interleaved, v stages per rank placed round-robin: bubble (P - 1)(F + B), 1/v of 1F1B's, since a stage is 1/v of a rank's layers;
  rank r holds 2(P - r - 1) + (v - 1) G + 1 microbatch-stages, at most m v; v times the messages.

G is the size of the groups in which microbatches visit a rank's stages. The paper has G = P and needs m to divide by P.
Here m is divided evenly over floor(m / P) groups, of G = ceil(m / floor(m / P)) or one less: no group is shorter than the
ring, so the bubble stays what it is above for every m >= P, and G = P where P divides m.
"""

from __future__ import annotations

from itertools import chain, repeat

from shardwise.schedules.actions import Action, Schedule, actions_of, keep_microbatches, loop_placement


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs P - r - 1 forwards, then alternates."""
    lists = []
    for rank in range(ranks):
        forward = actions_of("F", repeat(rank), range(microbatches))
        backward = actions_of("B", repeat(rank), range(microbatches))
        lists.append(_alternate(forward, backward, warmup=ranks - rank - 1))
    return Schedule("1f1b", tuple(lists), loop_placement(ranks, 1), microbatches)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` stages per rank: a group of microbatches goes through one of them, then through the next."""
    if chunks == 1:
        plain = one_forward_one_backward(ranks, microbatches)
        return Schedule("interleaved", plain.ranks, plain.placement, microbatches)
    groups, size = _groups(ranks, microbatches)
    visits = [(ranks * chunk, microbatch) for group in groups for chunk in range(chunks) for microbatch in group]
    firsts, visitors = zip(*visits, strict=True)
    lists = []
    for rank in range(ranks):
        last = rank + ranks * (chunks - 1)
        forward = actions_of("F", [rank + first for first in firsts], visitors)
        backward = actions_of("B", [last - first for first in firsts], visitors)
        # Two forwards for each rank below: the time a microbatch takes down to the last rank and its gradient back up.
        lists.append(_alternate(forward, backward, warmup=2 * (ranks - rank - 1) + (chunks - 1) * size))
    kept = tuple(lists) if len(visits) == chunks * microbatches else keep_microbatches(lists, microbatches)
    return Schedule("interleaved", kept, loop_placement(ranks, chunks), microbatches)


def _groups(ranks: int, microbatches: int) -> tuple[list[list[int]], int]:
    """Microbatches divided evenly into groups no shorter than the ring, each padded to one size with a number that no microbatch
    has.

    The padding is scheduled like any microbatch and left out afterwards. So the pace is that of a regular schedule, which has
    no deadlock, and leaving out whole microbatches cannot cause one.
    """
    count = max(1, microbatches // ranks)
    shortest, longer = divmod(microbatches, count)
    size = max(ranks, shortest + (longer > 0))
    groups: list[list[int]] = []
    first = 0
    for group in range(count):
        last = first + shortest + (group < longer)
        groups.append([*range(first, last), *[microbatches] * (size - (last - first))])
        first = last
    return groups, size


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forward))
    pairs = zip(forward[warmup:], backward, strict=False)
    return (*forward[:warmup], *chain.from_iterable(pairs), *backward[len(forward) - warmup :])
