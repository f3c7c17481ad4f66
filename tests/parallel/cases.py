"""What the ranks of a test compute: a few steps of a small model on a layout, and everything one would compare."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from shardwise.data.batches import IGNORE_INDEX, Batch
from shardwise.model.layers import at_least_float32
from shardwise.parallel.local_parameter import local, local_box
from shardwise.run import LayoutConfig, Run, UserError, run_from_dict
from shardwise.run.axes import ASYNCHRONOUS
from shardwise.run.ranks.boxes import Box
from shardwise.train.step import TrainState

DENSE = dict(layers=4, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=61, qk_norm=True)
MIXTURE = dict(
    layers=4, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=61, experts=4, experts_per_token=2, expert_ffn=24,
    shared_experts=1, dense_layers=1, router="sigmoid",
)  # fmt: skip
GPT = dict(norm="layernorm", activation="gelu", bias="all", qk_norm=False)
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "mixture": MIXTURE,
    "tied": DENSE | GPT | dict(tied_embeddings=True, position="learned", position_offset=2),
    "latent": dict(
        layers=4, hidden=32, heads=4, ffn=64, vocab=61, attention="latent", q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8,
    ),
    "parallel": DENSE | dict(parallel_block=True),
    "neox": DENSE | GPT | dict(activation="gelu_erf", parallel_block=True, parallel_norms=2, rope_share=0.5),
    "bloom": DENSE | GPT | dict(position="alibi", embedding_norm=True, tied_embeddings=True),
    "gemma": DENSE | dict(embedding_scale=True, activation="geglu", tied_embeddings=True, qk_norm=False),
    "capacity": MIXTURE | dict(expert_capacity=0.8),
    "window": DENSE | dict(sliding_window=11),
    "softmax": MIXTURE | dict(router="softmax", shared_experts=0, dense_layers=0),
    "few": MIXTURE | dict(experts=2, experts_per_token=1, dense_layers=0),
}  # fmt: skip
LATENT = {name: MODELS["latent"][name] for name in ("attention", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "tied embeddings": (dict(tied_embeddings=True),),
    "parallel block": (dict(parallel_block=True), dict(parallel_block=True, parallel_norms=2)),
    "alibi": (dict(position="alibi"), dict(position="alibi", embedding_norm=True)),
    "no query norm": (dict(qk_norm=False),),
    "latent attention": (LATENT | dict(qk_norm=False),),
    "window": tuple(dict(sliding_window=size) for size in (3, 16, 20)),
    "capacity": tuple(dict(expert_capacity=share) for share in (0.5, 1.0, 1.5)),
}
"""Parts that any of the models may have beside its own, each with what its keys may be."""
WIDE = dict(layers=4, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=61, qk_norm=True)
WIDE_MIXTURE = MIXTURE | dict(hidden=128, ffn=256, expert_ffn=128)
"""Models whose rows are whole blocks of 4-bit weights, also on two tensor ranks."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "": {},
    "lora": dict(kind="lora", rank=4),
    "lora first": dict(kind="lora", rank=3, targets=["q", "kv_down", "up"], rank_stabilized=True),
    "qlora": dict(kind="qlora", rank=4, targets=["q", "v", "up", "down"]),
    "qlora single": dict(kind="qlora", rank=4, double_quantization=False),
    "lora dropout": dict(kind="lora", rank=4, targets=["q", "k", "out", "kv_down", "up", "down"], dropout=0.3),
    "dora": dict(kind="dora", rank=4, targets=["q", "v", "kv", "out"]),
    "dora all": dict(kind="dora", rank=3),
    "lora last": dict(kind="lora", rank=4, targets=["v", "kv", "out", "down"]),
}
"""Adapters by name."""
TEACHER = dict(kind="distill", teacher=str(Path(__file__).with_name("teacher")))
"""A network of other sizes and another family, whose weights are drawn."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "distill": TEACHER | dict(teacher_tokens=7, cross_entropy=0.5),
    "distill reverse": TEACHER | dict(teacher_tokens=20, divergence="reverse", temperature=1.5),
    "dpo margins": dict(kind="dpo", margins=True),
    "distill whole": TEACHER | dict(teacher_tokens=0),
}
"""Objectives with keys of their own, by name."""
SCHEDULES: tuple[str, ...] = tuple(
    s for s in get_args(get_type_hints(LayoutConfig)["schedule"]) if s not in ASYNCHRONOUS
)
"""Those that compute what one process computes."""
METHODS: tuple[str, ...] = get_args(get_type_hints(LayoutConfig)["context_method"])
LENGTH, BATCH = 32, 8


def make_run(
    model: str,
    layout: dict[str, Any],
    layers: int = 4,
    objective: str = "pretrain",
    adapter: str = "",
    memory: dict[str, Any] | None = None,
    **train: Any,
) -> Run:
    share = train.get("global_batch", BATCH) // (layout.get("replicate", 1) * layout.get("shard", 1))
    base = dict(
        steps=3, seq_len=LENGTH, global_batch=BATCH, microbatch=max(1, share // 2), dtype="float64", device="cpu", lr=1e-2,
        clip=0.5, balance_loss=0.01, router_z_loss=0.001, balance_rate=0.01,
    )  # fmt: skip
    learned = OBJECTIVES.get(objective) or dict(zip(("kind", "loss"), objective.split(), strict=False))
    sections = dict(model=model_of(model) | dict(layers=layers), layout=layout, train=base | train, objective=learned)
    return run_from_dict(sections | dict(adapter=ADAPTERS[adapter], memory=memory or {}))


def model_of(name: str) -> dict[str, Any]:
    """The keys of a model and of the variants that its name adds to it, each with the number of what it chooses."""
    base, *variants = name.split(" + ")
    keys = dict((MODELS | {"wide": WIDE, "wide mixture": WIDE_MIXTURE})[base])
    for word in variants:
        variant, _, number = word.partition(" #")
        keys |= VARIANTS[variant][int(number or 0)]
    return keys


def layers_for(layout: dict[str, Any]) -> dict[str, int]:
    """Only a pipeline needs four layers to be cut; two, one of each kind, show the rest in half the messages."""
    return dict(layers=4 if layout.get("pipeline", 1) > 1 else 2)


def batch(step: int, documents: bool, rows: int = BATCH) -> Batch:
    """A global batch; with documents, rows packed from pieces of uneven lengths, some targets missing."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 61, (rows, LENGTH + 1))
    targets = tokens[:, 1:].copy()
    if not documents:
        return Batch(tokens[:, :-1].copy(), targets)
    positions, numbers = np.empty((rows, LENGTH), np.int64), np.empty((rows, LENGTH), np.int32)
    for row in range(rows):
        cuts = np.sort(rng.choice(np.arange(1, LENGTH), rng.integers(0, 4), replace=False))
        numbers[row] = np.searchsorted(cuts, np.arange(LENGTH), side="right")
        positions[row] = np.arange(LENGTH) - np.concatenate([[0], cuts])[numbers[row]]
        targets[row, cuts - 1] = IGNORE_INDEX
    margins = (numbers // 2 + 1).astype(np.float32)
    return Batch(
        tokens[:, :-1].copy(), targets, positions, numbers, labels=(numbers % 2).astype(np.int8), margins=margins
    )


def take(batch: Batch, rows: np.ndarray) -> Batch:
    optional = [None if a is None else a[rows] for a in (batch.positions, batch.documents, batch.labels)]
    margins = None if batch.margins is None else batch.margins[rows]
    return Batch(batch.tokens[rows], batch.targets[rows], *optional, margins=margins)


def train(rank: int, run: Run, documents: bool = True, seed: int = 0) -> dict[str, Any]:
    """Some steps; losses, gradient norms, an evaluation, and this rank's parts of the parameters, each with where it lies."""
    return train_and_evaluate(TrainState(run), documents, seed)


def train_and_evaluate(train_state: TrainState, documents: bool, seed: int = 0) -> dict[str, Any]:
    """As `train`, of a train state that is used further. The evaluation lies before the last step: it leaves the parameters of a
    layer gathered, which that step finds."""
    run = train_state.run
    last = run.train.steps - 1
    before = steps(train_state, 0, last, documents, seed)
    evaluated = train_state.evaluate(lambda rows: take(batch(99, documents), rows), np.arange(5))
    executed = list(train_state.parallel.pipeline.executed)
    after = steps(train_state, last, last + 1, documents, seed)
    losses, norms = (one + other for one, other in zip(before, after, strict=True))
    trained = list(train_state.parallel.pipeline.executed)
    parameters = held_parameters(train_state)
    biases = {
        f"layers.{n}.bias": ((slice(None),), block.ffn.router.bias.cpu().numpy().copy())
        for model in train_state.parallel.models
        for n, block in model.layers.items()
        if hasattr(block.ffn, "router") and run.model.router == "sigmoid"
    }
    return dict(
        losses=losses, norms=norms, evaluated=evaluated, parameters=parameters | biases, trained=trained, executed=executed
    )  # fmt: skip


def held_parameters(train_state: TrainState) -> dict[str, Any]:
    """This rank's parts of the parameters, each with where it lies."""
    return {
        h.name: (
            slices(local_box(h, train_state.mesh)),
            at_least_float32(local(h.parameter.detach())).cpu().numpy().copy(),
        )
        for h in train_state.parallel.parameters
    }


def steps(
    train_state: TrainState, first: int, last: int, documents: bool, seed: int = 0
) -> tuple[list[float], list[float]]:
    """Run some steps of a train state on this rank's rows of each batch."""
    losses, norms = [], []
    for step in range(first, last):
        size = train_state.run.train.global_batch
        rows = train_state.samples(np.arange(size))
        result = train_state.train_step(take(batch(step + 1000 * seed, documents, size), rows))
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    return losses, norms


def slices(place: Box) -> tuple[slice, ...]:
    """A box as an index into the whole."""
    return tuple(slice(start, start + size) for start, size in zip(place.offset, place.size, strict=True))


def random_layout(
    generator: random.Random,
    models: Sequence[str] = ("dense", "mixture", "tied", "latent", "softmax"),
    axes: int = 2,
    world: int = 8,
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A legal combination of at least so many axes on up to so many ranks; illegal draws are thrown away."""
    while True:
        model, layout, train = draw_layout(generator, models, axes, world)
        try:
            make_run(model, layout, **train)
        except UserError:
            continue
        return model, layout, train


def draw_layout(
    generator: random.Random, models: Sequence[str], axes: int, world: int
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A combination of at least so many axes on up to so many ranks, legal or not."""
    model = generator.choice(models)
    while True:
        sizes = {a: generator.choice([1, 1, 2, 2, 4]) for a in ("replicate", "shard", "context", "tensor", "pipeline")}
        if math.prod(sizes.values()) <= world and sum(size > 1 for size in sizes.values()) >= axes:
            break
    layout: dict[str, Any] = dict(sizes)
    layout["zero"] = generator.choice([1, 2, 3])
    layout["context_method"] = generator.choice(METHODS)
    layout["schedule"] = generator.choice(SCHEDULES) if sizes["pipeline"] > 1 else "1f1b"
    layout["recompute"] = generator.choice(["none", "none", "attention", "full"])
    layout["expert_tensor"] = generator.random() < 0.5
    layout["async_tensor"] = generator.random() < 0.3
    if model_of(model).get("experts"):
        layout["expert"] = generator.choice([1, 2, 4])
    return model, layout, dict(microbatch=generator.choice([1, 2, 4, 4, 8]))
