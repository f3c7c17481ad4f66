"""Which layers each pipeline stage holds: given by hand, or balanced by work with embedding, head and loss counted."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from shardwise.plan.cost.flops import attention_parameters, feed_forward_parameters, keys_seen
from shardwise.run import LayoutConfig, ModelConfig, Run
from shardwise.schedules import split_layers


def layer_work(model: ModelConfig, layer: int, seq_len: int) -> float:
    """Operations of one token in one layer, forward, in multiply-adds."""
    v_dim = model.v_dim if model.attention == "latent" else model.head_dim
    attention = attention_parameters(model)[0] + model.heads * (model.head_dim + v_dim) * keys_seen(model, seq_len)
    if model.experts and layer >= model.dense_layers:
        width = model.expert_ffn * (model.experts_per_token + model.shared_experts)
        return attention + feed_forward_parameters(model, width)[0] + model.experts * model.hidden
    return attention + feed_forward_parameters(model, model.ffn)[0]


def layers_of_stages(run: Run) -> list[range]:
    """The layers of every stage of a run, in order."""
    ends = [0, *accumulate(stage_counts(run.model, run.layout, run.train.seq_len))]
    return [range(a, b) for a, b in pairwise(ends)]


def stage_counts(model: ModelConfig, layout: LayoutConfig, seq_len: int) -> tuple[int, ...]:
    """How many layers every stage holds."""
    return layout.stages or _balanced(model, layout.pipeline * layout.stages_per_rank, seq_len)


@lru_cache(maxsize=4096)
def _balanced(model: ModelConfig, stages: int, seq_len: int) -> tuple[int, ...]:
    costs = [layer_work(model, layer, seq_len) for layer in range(model.layers)]
    head = float(model.vocab * model.hidden)
    # An embedding looks rows up: next to nothing forward, a scattered addition backward.
    return split_layers(costs, stages, first=float(model.hidden), last=head)
