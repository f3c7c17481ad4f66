"""Which layers each pipeline stage has: those that the run says, or so many that the stages' GEMMs are as even as they can be."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from shardwise.plan.cost.flops import layer_multiply_adds
from shardwise.run import LayoutConfig, ModelConfig, Run
from shardwise.schedules import split_layers


def layers_of_stages(run: Run) -> list[range]:
    """The layers of every stage of a run, in order; direction by direction where microbatches enter at both ends."""
    return list(_ranges(stage_counts(run.model, run.layout, run.train.seq_len)) * run.layout.directions)


@lru_cache(maxsize=256)
def _ranges(counts: tuple[int, ...]) -> tuple[range, ...]:
    """Cached: every rank of a long pipeline asks."""
    return tuple(range(a, b) for a, b in pairwise([0, *accumulate(counts)]))


def stage_counts(model: ModelConfig, layout: LayoutConfig, seq_len: int) -> tuple[int, ...]:
    """How many layers every stage of one direction holds."""
    return layout.stages or _balanced(model, layout.distinct_stages, seq_len)


@lru_cache(maxsize=4096)
def _balanced(model: ModelConfig, stages: int, seq_len: int) -> tuple[int, ...]:
    each = {moe: layer_multiply_adds(model, moe, seq_len) for moe in set(map(model.is_moe, range(model.layers)))}
    costs = [each[model.is_moe(layer)] for layer in range(model.layers)]
    head = float(model.head_rows * model.hidden)
    # An embedding looks rows up: next to nothing forward, a scattered addition backward.
    return split_layers(costs, stages, first=float(model.hidden), last=head)
