"""ZB-2p (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2.2 and 3.1): split backwards with twice the memory of
1F1B, in which no rank waits between its first action and its last.

A rank runs forwards ahead until the first gradient comes back up, 2(P - r) - 1 of them on rank r, and keeps 2P - 1 microbatches in
all, including those whose W is deferred. Within these two limits the lists follow the paper's heuristic: play the pipeline, and
give each idle rank an I where one is ready, else an F, else a W. Each of the three takes one unit of time here, the case for which
the paper draws this schedule by hand (ZB-H2). P is the number of ranks, r a rank from 0, and there are m >= 2P - 1 microbatches:

- waiting between a rank's first and last action: none where F = I = W. Where they differ ZB-H2's is (P - 1)(F + I - 2W);
- rank r ends r F after rank 0, as it began. Where all ranks synchronise after the step (P - 1) F of bubble remain; the paper
  removes it by stepping the optimizer without synchronising;
- rank r holds 2(P - r) - 1 microbatches before I and 2r between I and W, 2P - 1 in all; the paper's limit is 2P.
"""

from __future__ import annotations

from shardwise.schedules.actions import Schedule, keep_microbatches, loop_placement
from shardwise.schedules.split_backward import RankList


def zb_2p(ranks: int, microbatches: int) -> Schedule:
    """Forwards run as far ahead as a microbatch takes down and up again; W runs wherever nothing else can."""
    regular = max(microbatches, 2 * ranks - 1)
    lists = [RankList() for _ in range(ranks)]
    done = [0] * ranks  # number of W each rank has done
    sent = [
        [regular, *[0] * (ranks - 1)],
        [*[0] * (ranks - 1), regular],
    ]  # forwards and gradients that each rank has received
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
    made = tuple(tuple(out.actions) for out in lists)
    kept = made if microbatches == regular else keep_microbatches(made, microbatches)
    return Schedule("zb-2p", kept, loop_placement(ranks, 1), microbatches)
