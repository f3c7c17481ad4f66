"""Which layers each pipeline stage holds: given by hand, or balanced by work with embedding, head and loss counted."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from shardwise.plan.cost.flops import layer_multiply_adds
from shardwise.run import LayoutConfig, ModelConfig, Run
from shardwise.schedules import split_layers


def layers_of_stages(run: Run) -> list[range]:
    """The layers of every stage of a run, in order."""
    ends = [0, *accumulate(stage_counts(run.model, run.layout, run.train.seq_len))]
    return [range(a, b) for a, b in pairwise(ends)]


def stage_counts(model: ModelConfig, layout: LayoutConfig, seq_len: int) -> tuple[int, ...]:
    """How many layers every stage holds."""
    return layout.stages or _balanced(model, layout.pipeline * layout.stages_per_rank, seq_len)


@lru_cache(maxsize=4096)
def _balanced(model: ModelConfig, stages: int, seq_len: int) -> tuple[int, ...]:
    costs = [layer_multiply_adds(model, model.is_moe(layer), seq_len) for layer in range(model.layers)]
    head = float(model.vocab * model.hidden)
    # An embedding looks rows up: next to nothing forward, a scattered addition backward.
    return split_layers(costs, stages, first=float(model.hidden), last=head)
