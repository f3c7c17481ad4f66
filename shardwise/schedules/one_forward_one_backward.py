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

Asynchronous pipelines are 1F1B that goes on from step to step without a flush. Rank r of P is d = P - 1 - r microbatches behind in
its backward passes, and updates its weights as soon as it has the gradients of a step; no rank waits for another's update. A
microbatch uses the same weights forward and backward, which are not the latest: so what is learned differs from every synchronous
schedule. With m microbatches per step, microbatch j of step t (both from 0) uses the weights after this many updates:

- PipeDream with weight stashing (Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section
  3.3): the latest that the rank has, max(0, floor((t m + j - d) / m)). With m = 1, as in the paper, rank r is d updates behind. It
  keeps 1 + ceil(d / m) versions of its weights; with m = 1 the first rank keeps P;
- PipeDream-2BW (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1): max(0, t - 1) on every
  rank, W(t + 1) = W(t) - step(gradient at W(t - 1)). Two versions suffice while m >= P.

The list of a rank is one step of a pipeline that is empty before and after: 1F1B, then U, the update. During training the lists of
steps overlap: the first forward passes of a step come before the last backward passes of the step before, which is 1F1B over the
microbatches of all steps. A step then takes m (F + B) and has no bubble; rank r holds P - r microbatches, as in 1F1B.
"""

from __future__ import annotations

from dataclasses import replace
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
        return replace(one_forward_one_backward(ranks, microbatches), name="interleaved")
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
    kept = keep_microbatches(lists, microbatches, len(visits) // chunks)
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


def asynchronous(name: str, ranks: int, microbatches: int) -> Schedule:
    """One step of an asynchronous pipeline."""
    plain = one_forward_one_backward(ranks, microbatches)
    lists = tuple((*actions, Action("U", rank, microbatches - 1)) for rank, actions in enumerate(plain.ranks))
    return replace(plain, name=name, ranks=lists)


def version_of(name: str, behind: int, microbatches: int, number: int) -> int:
    """Number of updates in the weights that microbatch `number`, counted over all steps, uses on a rank that is `behind`
    microbatches behind."""
    if name == "pipedream-2bw":
        return max(0, number // microbatches - 1)
    return max(0, (number - behind) // microbatches)


def versions_kept(name: str, behind: int, microbatches: int) -> int:
    """Versions of its weights that such a rank keeps besides the latest."""
    return 1 if name == "pipedream-2bw" else -(-behind // microbatches)
