"""Asynchronous pipelines: 1F1B that goes on from step to step without a flush.

Rank r of P is d = P - 1 - r microbatches behind in its backward passes, and updates its weights as soon as it has the gradients of
a step; no rank waits for another's update. A microbatch uses the same weights forward and backward, which are not the latest: so
what is learned differs from every synchronous schedule. With m microbatches per step, microbatch j of step t (both from 0) uses the
weights after this many updates:

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

from shardwise.schedules.actions import Action, Schedule
from shardwise.schedules.one_forward_one_backward import one_forward_one_backward


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
