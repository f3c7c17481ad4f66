"""GPipe (Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism").

Every microbatch goes forward, then every one goes back. With P ranks, m microbatches, F and B the times of one stage:

- bubble on each rank: (P - 1)(F + B);
- activations held: m microbatches on every rank, which is what all later schedules improve on.

The paper goes back in reverse order. Here microbatches go back in the order they went forward, as in every schedule of
this folder, so that a stage adds up its gradients in one order and all schedules give bit for bit the same sum.
"""

from __future__ import annotations

from shardwise.schedules.actions import Action, Schedule, loop_placement


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    lists = tuple(
        tuple(Action(kind, rank, microbatch) for kind in ("F", "B") for microbatch in range(microbatches))
        for rank in range(ranks)
    )
    return Schedule("gpipe", lists, loop_placement(ranks, 1), microbatches)
