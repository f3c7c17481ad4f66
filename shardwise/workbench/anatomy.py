"""The model and the layout for pictures: the blocks of the network with shapes, parameters and FLOPs, and the mesh of ranks with
the layers that each pipeline rank holds. All of it is read from the parameter table and the coordinates of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.plan.cost.flops import keys_seen
from shardwise.plan.cost.stages import layers_of_stages
from shardwise.run import Run
from shardwise.run.parameters import Parameter, first_parameters, last_parameters, layer_parameters
from shardwise.run.ranks.coordinates import GROUPS, group_span

SHOWN_GROUPS = tuple(group for group in GROUPS if group not in ("world", "sequence", "zero", "expert_shard"))


def blocks(run: Run) -> list[dict[str, Any]]:
    """The network from tokens to logits: each kind of block once, with its number of occurrences."""
    model = run.model
    dense = model.layers - model.moe_layers
    tied = [_score(run)] if model.tied_embeddings else []
    found = [("embedding", 1, [_piece(run, entry) for entry in first_parameters(model, run.adapter)])]
    for moe, count in ((False, dense), (True, model.moe_layers)):
        if count:
            pieces = [_piece(run, entry) for entry in layer_parameters(model, moe, run.adapter)]
            found.append(("MoE layer" if moe else "layer", count, [*pieces, _attention(run)]))
    found.append(("head", 1, [*(_piece(run, entry) for entry in last_parameters(model, run.adapter)), *tied]))
    return [{"title": title, "times": times, "pieces": pieces} for title, times, pieces in found]


def _piece(run: Run, entry: Parameter) -> dict[str, Any]:
    """A parameter: its name and shape, its FLOPs in a token's forward pass, and how the layout shards it. An embedding is a
    lookup, without FLOPs."""
    model = run.model
    met = entry.numel // model.experts * model.experts_per_token if entry.routed else entry.numel
    tied = entry.owner == "embedding"
    return {
        "name": entry.name.removesuffix(".weight"),
        "owner": entry.owner,
        "shape": list(entry.shape),
        "parameters": entry.numel * entry.packed,
        "flops": 2.0 * met * entry.packed if entry.multiplied and not tied else 0.0,
        "cuts": [list(cut) for cut in entry.cuts(run.layout)],
        "frozen": entry.frozen,
    }


def _attention(run: Run) -> dict[str, Any]:
    """Queries times keys and the weighted sum of values, which have no parameters."""
    model = run.model
    flops = 2.0 * model.heads * (model.head_dim + model.value_dim) * keys_seen(model, run.train.seq_len)
    shape = [model.heads, run.train.seq_len, run.train.seq_len]
    cuts = [[axis, dim] for axis, dim in (("tensor", 0), ("context", 1)) if getattr(run.layout, axis) > 1]
    return {
        "name": "attention scores",
        "owner": "scores",
        "shape": shape,
        "parameters": 0,
        "flops": flops,
        "cuts": cuts,
    }


def _score(run: Run) -> dict[str, Any]:
    """The head of a tied embedding: FLOPs without parameters of its own."""
    model = run.model
    shape, flops = [model.head_rows, model.hidden], 2.0 * model.head_rows * model.hidden
    return {"name": "head, tied to embed", "owner": "head", "shape": shape, "parameters": 0, "flops": flops, "cuts": []}


def mesh(run: Run, placement: Sequence[int], per_node: int) -> dict[str, Any]:
    """The ranks: size and stride of each group, and for each pipeline rank its stages and layers, and whether it has the
    embedding and the head."""
    lay = run.layout
    layers = layers_of_stages(run)
    # Without pipeline parallelism, the one pipeline rank has all stages.
    homes = placement if lay.pipeline > 1 else [0] * len(layers)
    held: list[list[Any]] = [[] for _ in range(lay.pipeline)]
    for stage, home in enumerate(homes):
        held[home].append([stage, layers[stage].start, layers[stage].stop])
    spans = {group: list(group_span(lay, group)) for group in SHOWN_GROUPS}
    # With two directions, a rank may have the embedding of one and the head of the other.
    ends = [[any(lay.has_ends(stage)[end] for stage, *_ in rank) for end in (0, 1)] for rank in held]
    return {"world": lay.world, "per_node": per_node, "spans": spans, "stages": held, "ends": ends}
