"""Which layers each pipeline stage holds: given by hand, or balanced by work with embedding, head and loss counted."""

from __future__ import annotations

from itertools import accumulate, pairwise

from shardwise.plan.work import attention_parameters, feed_forward_parameters, keys_seen
from shardwise.run import ModelConfig, Run
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
    """The layers of every stage, in order."""
    stages = run.layout.pipeline * run.layout.stages_per_rank
    counts = run.layout.stages
    if not counts:
        costs = [layer_work(run.model, layer, run.train.seq_len) for layer in range(run.model.layers)]
        head = float(run.model.vocab * run.model.hidden)
        # An embedding looks rows up: next to nothing forward, a scattered addition backward.
        counts = split_layers(costs, stages, first=float(run.model.hidden), last=head)
    ends = [0, *accumulate(counts)]
    return [range(a, b) for a, b in pairwise(ends)]
