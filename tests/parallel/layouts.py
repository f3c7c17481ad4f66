"""The layouts that tests run: random ones, drawn by the seed of the commit, of which `covering.py` makes an array, and a list of
edges that a draw would seldom meet. A layout is a model's name, layout keys, and training keys."""

from __future__ import annotations

import itertools
import random
from typing import Any

import cases

from shardwise.run import Run, UserError
from shardwise.run.axes import BIDIRECTIONAL
from shardwise.run.derive import compiles

Drawn = tuple[str, dict[str, Any], dict[str, Any]]
AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")
LOW_PRECISION = dict(dtype="bfloat16")
OBJECTIVES = ("dpo", "dpo ipo", "dpo margins", "kto", "orpo", "simpo", "reward")
KINDS = [name for name in cases.ADAPTERS if name.startswith(("lora", "dora"))]
"""Adapters of any model; those in 4 bits need one that is wide."""


def draw(generator: random.Random, world: int, axes: int = 2) -> Drawn:
    """A legal layout of at least so many axes, with every choice a user has, of a model with some variants beside its own."""
    return draw_with_run(generator, world, axes)[0]


def draw_with_run(generator: random.Random, world: int, axes: int) -> tuple[Drawn, Run]:
    """As `draw`, with the run that it makes."""
    while True:
        model, layout, train = cases.draw_layout(generator, tuple(cases.MODELS), axes=axes, world=world)
        for name, choices in cases.VARIANTS.items():
            if generator.random() < 0.3 and (name != "capacity" or cases.model_of(model).get("experts")):
                model += f" + {name} #{generator.randrange(len(choices))}"
        layout["recompute"] = generator.choice(["none", "attention", "full", "operations", "budget", "optimal"])
        if layout["recompute"] == "operations":
            layout["recompute_operations"] = tuple(generator.sample(["norm", "attention", "ffn"], 2))
        if layout["recompute"] in ("budget", "optimal"):
            layout["recompute_budget"] = generator.choice([3e-5, 1e-4, 2e-4, 5e-4])
        if layout["recompute"] == "full":
            layout["recompute_every"] = generator.choice([1, 2])
        if layout["schedule"] in ("interleaved", "breadth-first"):
            layout["chunks"] = generator.choice([2, 2, 3])
        if layout["pipeline"] == 2 and generator.random() < 0.3:
            layout["stages"] = generator.choice([(1, 3), (0, 4), (0, 2, 2, 0), (1, 2, 1, 0)])
        if layout["replicate"] * layout["shard"] == 1 and generator.random() < 0.5:
            train |= dict(global_batch=3, microbatch=1)
        elif (
            layout["pipeline"] == 1
        ):  # a first and a last microbatch are all that a step without a pipeline can tell apart
            train["microbatch"] = max(train["microbatch"], cases.BATCH // (layout["replicate"] * layout["shard"]) // 2)
        train["optimizer"] = generator.choice(["adamw", "adamw", "muon"])
        train["loss"] = generator.choice(["plain", "chunked"])
        if generator.random() < 0.2:
            train |= dict(parametrization="mup", base_width=8, base_layers=1)
        if run := legal_run(model, layout, train):
            return (model, layout, train), run


def draw_tuned(generator: random.Random, world: int, axes: int = 2) -> tuple[Drawn, Run]:
    """As `draw_with_run`; some of them learn something else than the next token, train adapters alone, or round to 16 bits."""
    while True:
        (model, layout, train), run = draw_with_run(generator, world, axes)
        more: dict[str, Any] = {}
        if generator.random() < 0.4:
            more["objective"] = generator.choice(OBJECTIVES)
        if generator.random() < 0.3:
            more |= dict(adapter=generator.choice(KINDS), optimizer="adamw")
        if generator.random() < 0.1:
            more["dtype"] = "bfloat16"
        tuned = legal_run(model, layout, train | more) if more else run
        if tuned:
            return (model, layout, train | more), tuned


def legal_run(model: str, layout: dict[str, Any], train: dict[str, Any]) -> Run | None:
    """The run of a layout, if there is one."""
    try:
        return cases.make_run(model, layout, **cases.layers_for(layout) | train)
    except UserError:
        return None


def random_layout(seed: int, number: int) -> Drawn:
    """One of many, on up to eight ranks."""
    return draw_tuned(random.Random(f"{seed} {number}"), world=8)[0]


def compiled_layout(seed: int, number: int) -> Drawn:
    """One of many on up to four ranks whose layers may be compiled."""
    generator = random.Random(f"{seed} compiled {number}")
    while True:
        model, layout, train = draw(generator, world=4, axes=1)
        run = cases.make_run(model, layout, **cases.layers_for(layout) | train | dict(dtype="bfloat16"))
        if compiles(run, gpu=True):
            return model, layout, train


SMALL_EDGES: list[Drawn] = [
    ("mixture", dict(shard=3), dict(global_batch=6)),  # rows that do not divide are padded
    ("few", dict(shard=4, expert=2), dict(microbatch=1, global_batch=4)),  # each expert is sharded over two ranks
    # More ranks than key/value heads, which talk about each chunk of the loss.
    ("tied", dict(tensor=4, async_tensor=True), dict(global_batch=4, loss="chunked")),
    ("dense", dict(context=4, context_method="ulysses"), dict(layers=1)),  # whose key/value heads are then repeated
    # A stage between the ends that is done with its microbatches before others come fetches a layer in vain.
    ("dense", dict(pipeline=2, shard=2, schedule="interleaved", prefetch=2), dict(layers=8, global_batch=4, microbatch=1)),
    ("dense", dict(replicate=2), LOW_PRECISION | dict(reduce_dtype="bfloat16")),
    ("bloom", dict(recompute="optimal", recompute_budget=3e-5), dict(layers=2)),  # drops all that ALiBi lets it
    # Deferred gradients that are not added up yet.
    ("dense", dict(pipeline=2, shard=2, schedule="zb-h1"), LOW_PRECISION | dict(layers=2, global_batch=4, microbatch=1)),
    ("wide", dict(shard=2, tensor=2), dict(adapter="qlora", layers=1)),
    ("wide mixture", dict(shard=2, expert=2), dict(adapter="qlora", layers=2, global_batch=4)),
    # A teacher of other sizes, which has experts.
    ("dense", dict(tensor=2, shard=2), dict(objective="distill", global_batch=4)),
    ("tied", dict(pipeline=2, context=2, stages=(1, 3)), dict(objective="distill reverse", global_batch=4)),
    ("dense", dict(context=2), dict(objective="reward", adapter="lora")),  # whose head of scores is learned beside
    ("tied", dict(pipeline=4, schedule="bpipe"), dict(global_batch=6, microbatch=1)),  # with enough ranks to even out
    ("tied", dict(pipeline=4, schedule="dualpipe"), dict(microbatch=1)),  # with ranks between the ends
    ("mixture", dict(pipeline=4, schedule="bpipe"), dict(global_batch=5, microbatch=1)),
    ("mixture", dict(shard=4, expert=2, secondary_shard=2), dict(microbatch=1)),  # experts are gathered from all
    ("mixture", dict(shard=4, secondary_shard=2, pipeline=2), dict(microbatch=1)),  # experts are not
]  # fmt: skip
"""What the covering array does not draw, one of each kind."""
BPIPE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(tensor=2), {}), (dict(shard=2, recompute="full"), {}), (dict(context=2, zero=1), {}), (dict(replicate=2, zero=2), {}),
    (dict(recompute="attention"), LOW_PRECISION), (dict(tensor=2, recompute="attention"), dict(adapter="lora")),
]  # fmt: skip
"""What BPipe hands over, with other axes beside."""
BPIPE_EXPERTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}), (dict(zero=1), LOW_PRECISION), (dict(shard=1, tensor=2, expert=1), {}), (dict(recompute="attention"), {}),
]  # fmt: skip
"""What it hands over of experts, whose tokens are not as many in every microbatch."""
DUALPIPE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(tensor=2), {}), (dict(shard=2, zero=1), dict(optimizer="muon")), (dict(shard=2, zero=2, expert=2), LOW_PRECISION),
    (dict(context=2, recompute="full"), {}), (dict(replicate=2), {}), (dict(tensor=2), dict(objective="kto")),
    (dict(), dict(adapter="lora", objective="dpo")), (dict(pipeline=4, shard=2), dict(layers=8, global_batch=32)),
]  # fmt: skip
"""What DualPipe adds over two ranks, with other axes beside."""
SECONDARY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(shard=4), LOW_PRECISION), (dict(shard=2, context=2, recompute="full"), {}), (dict(shard=4, tensor=2), {}),
    (dict(shard=4, replicate=2, prefetch=2), dict(layers=4)), (dict(shard=6, secondary_shard=3), dict(global_batch=12)),
    (dict(shard=4), dict(objective="kto")), (dict(context=4), dict(adapter="lora")), (dict(shard=4), dict(optimizer="muon")),
    (dict(shard=4, pipeline=2), dict(layers=6)), (dict(shard=4, pipeline=2, schedule="zb-v"), LOW_PRECISION | dict(layers=8)),
    (dict(shard=2, context=2, pipeline=2, schedule="interleaved"), dict(layers=8)),
    (dict(shard=4, pipeline=2, schedule="dualpipe", recompute="full"), dict(layers=6, objective="dpo")),
    (dict(shard=4, pipeline=2, schedule="gpipe", prefetch=2), dict(layers=6)),
]  # fmt: skip
"""Secondary shards, with other axes beside."""
FEWER_EXPERTS_THAN_RANKS: list[Drawn] = [
    *[("few", dict(shard=4, expert=2, zero=zero), {}) for zero in (1, 2, 3)],
    ("few", dict(shard=4), {}),
    ("few", dict(shard=2, context=2, expert=2, recompute="full"), {}),
    ("few", dict(replicate=2, shard=4, expert=2, zero=2), dict(global_batch=16)),
    ("few", dict(shard=4, tensor=2, expert=2, expert_tensor=True), {}),
    ("few", dict(pipeline=2, shard=4, expert=2, schedule="zb-h1"), dict(microbatch=1)),
    # Nothing that five ranks divide.
    ("few", dict(shard=5), dict(global_batch=10)),
    ("few", dict(shard=4, expert=2), LOW_PRECISION | dict(microbatch=1)),
    ("few", dict(shard=4, expert=2), LOW_PRECISION | dict(optimizer="muon")),
    ("few", dict(shard=4, expert=2), dict(optimizer="muon")),
    ("few", dict(shard=4, tensor=2, expert=2, expert_tensor=True), dict(optimizer="muon")),
    ("mixture", dict(shard=3), dict(global_batch=6, optimizer="muon")),
]
"""Layouts in which the ranks that shard experts are more than these, or do not divide them."""
ONE_AXIS: dict[str, dict[str, Any]] = {
    **{axis: {axis: 2} for axis in AXES if axis != "expert"},
    "expert": dict(shard=2, expert=2),
}
ADAPTER_EDGES: list[Drawn] = [
    *[
        (model, ONE_AXIS[axis], dict(adapter=kind))
        for model in ("dense", "mixture")
        for axis in AXES
        for kind in KINDS
        if (model, axis) != ("dense", "expert")
    ],
    *[
        ("mixture", ONE_AXIS[one] | ONE_AXIS[other], dict(adapter=KINDS[number % len(KINDS)]))
        for number, (one, other) in enumerate((a, b) for a in AXES for b in AXES if a < b)
    ],
    *[(model, {}, more | dict(adapter=kind)) for model in cases.MODELS for kind in KINDS for more in ({}, LOW_PRECISION)],
    *[("wide", {axis: 2}, dict(adapter="qlora", layers=2)) for axis in AXES if axis != "expert"],
    *[("wide mixture", layout, dict(adapter="qlora", layers=2)) for layout in ONE_AXIS.values()],
    ("wide mixture", dict(shard=2, tensor=2, expert=2, expert_tensor=True), dict(adapter="qlora single", layers=2)),
    *[("wide", {a: 2, b: 2}, dict(adapter="qlora single", layers=2)) for a, b in itertools.combinations(AXES[:5], 2)],
    ("wide", dict(shard=2, recompute="full"), LOW_PRECISION | dict(adapter="qlora", layers=2)),
    ("wide", dict(tensor=2, pipeline=2, schedule="zb-h1"), LOW_PRECISION | dict(adapter="qlora")),
    ("dense", dict(tensor=4), dict(adapter="lora")),  # more ranks than key/value heads
    ("dense", dict(context=2, tensor=2, context_method="gather"), dict(adapter="dora")),  # of which each rank has one
    ("dense", dict(shard=2, zero=2), LOW_PRECISION | dict(adapter="lora")),
    ("dense", dict(tensor=2), LOW_PRECISION | dict(adapter="lora")),
    ("mixture", dict(tensor=2, shard=2, expert=2, expert_tensor=True), LOW_PRECISION | dict(adapter="lora")),
    ("dense", dict(replicate=2), LOW_PRECISION | dict(adapter="lora", reduce_dtype="bfloat16")),
]  # fmt: skip
"""Each kind of adapter on every axis, every model and every pair."""
OBJECTIVE_EDGES: list[Drawn] = [
    ("mixture", dict(context=2, tensor=2), dict(objective="orpo")),
    ("tied", dict(pipeline=2, shard=2), dict(objective="simpo")),
    ("dense", dict(tensor=2, shard=2, zero=1), dict(objective="dpo")),
    ("latent", dict(pipeline=2, context=2), dict(objective="dpo ipo")),
    ("tied", dict(replicate=2), LOW_PRECISION | dict(objective="dpo")),
    ("dense", dict(tensor=2, shard=2), dict(objective="dpo", adapter="lora")),  # whose reference is it without adapters
    # A stage between the ends, through which passes go that no backward pass follows.
    (
        "neox",
        dict(pipeline=2, shard=2, schedule="breadth-first", stages=(1, 2, 1, 0)),
        dict(objective="dpo", adapter="lora"),
    ),
    (
        "tied",
        dict(pipeline=2, shard=2, stages=(0, 2, 2, 0), schedule="interleaved", zero=2),
        dict(objective="dpo margins", layers=4),
    ),
    ("dense", dict(context=2, shard=2), dict(objective="kto")),
    ("dense", dict(context=2), dict(objective="kto", adapter="lora")),  # of whose four passes two stand for a reference
    ("tied", dict(tensor=2, context=2), dict(objective="reward")),
    ("mixture", dict(pipeline=2, shard=2, expert=2), dict(objective="reward")),
    ("dense", dict(pipeline=2, tensor=2), dict(objective="kto")),
    ("tied", dict(tensor=2, shard=2), LOW_PRECISION | dict(objective="reward", adapter="lora")),
    ("dense", dict(pipeline=2, context=2), dict(objective="reward", adapter="lora")),
    ("dense", dict(context=2, shard=2), dict(objective="dpo margins")),
    ("dense", dict(replicate=2), LOW_PRECISION | dict(objective="distill", adapter="lora")),
]
"""Objectives without the company of variants."""
LARGE_EDGES: list[Drawn] = [
    *OBJECTIVE_EDGES,
    *[("tied", dict(shard=2, pipeline=2, schedule=schedule), LOW_PRECISION) for schedule in ("1f1b", "zb-h1", "dualpipe-v")],
    ("mixture", dict(tensor=2, expert_tensor=True), LOW_PRECISION),
    ("tied", dict(tensor=4), dict(loss="chunked")),
    ("dense", dict(tensor=4, async_tensor=True), dict(global_batch=4)),
    # With no one to gather from a stage between the ends fetches nothing.
    ("tied", dict(pipeline=2, replicate=2, schedule="interleaved", stages=(0, 2, 2, 0)), dict(layers=4, microbatch=1)),
    # Each model alone, in both precisions.
    *[(model, {}, more) for model in cases.MODELS for more in ({}, LOW_PRECISION)],
    ("dense", {}, dict(dtype="float32")),
    # Each axis alone and every pair, without any variant.
    *[(model, ONE_AXIS[axis], {}) for model in ("dense", "mixture") for axis in AXES if (model, axis) != ("dense", "expert")],
    *[
        (model, ONE_AXIS[one] | ONE_AXIS[other], {})
        for model in ("dense", "mixture")
        for one, other in itertools.combinations(AXES, 2)
        if model == "mixture" or other != "expert"
    ],
    *FEWER_EXPERTS_THAN_RANKS,
    # The embedding and the head as stages of their own.
    ("tied", dict(shard=2, pipeline=2, schedule="interleaved", stages=(0, 2, 2, 0)), {}),
    # Replicas and shards.
    *[("dense", dict(secondary_shard=2) | axes, dict(global_batch=16, microbatch=1) | more) for axes, more in SECONDARY],
    ("mixture", dict(shard=8, expert=2, secondary_shard=4), dict(global_batch=8)),
    ("mixture", dict(shard=8, expert=2, secondary_shard=4, recompute="full"), dict(global_batch=16, microbatch=1) | LOW_PRECISION),
    ("few", dict(shard=4, secondary_shard=2), {}),  # which are not cut along the first dimension
    ("dense", dict(replicate=2, shard=2, zero=2), dict(dtype="float32")),
    ("dense", dict(replicate=4), {}),
    ("dense", dict(replicate=4), LOW_PRECISION | dict(reduce_dtype="bfloat16")),
    ("dense", dict(replicate=2), LOW_PRECISION | dict(reduce_dtype="float64")),
    ("dense", dict(replicate=2), LOW_PRECISION),
    *[("dense", dict(shard=size, zero=zero), dict(microbatch=1)) for size in (2, 4) for zero in (1, 2, 3)],
    *[("dense", dict(replicate=2, shard=2, zero=zero), dict(microbatch=1)) for zero in (1, 2, 3)],
    ("dense", dict(shard=3, zero=2), dict(global_batch=6)),
    ("dense", dict(shard=2, zero=1), LOW_PRECISION | dict(reduce_dtype="bfloat16")),
    ("dense", dict(shard=4, zero=3), LOW_PRECISION | dict(microbatch=1)),
    ("mixture", dict(shard=2, replicate=2, zero=1), {}),
    ("mixture", dict(shard=2, zero=2), {}),
    ("dense", dict(shard=2, recompute="full", recompute_every=2), {}),
    ("dense", dict(recompute="full", recompute_every=3), LOW_PRECISION | dict(layers=4)),
    # Tensor.
    ("tied", dict(tensor=4), {}),
    ("dense", dict(tensor=4), LOW_PRECISION),
    ("latent", dict(tensor=4), {}),
    ("tied", dict(tensor=2, async_tensor=True, recompute="full"), {}),
    ("dense", dict(tensor=2, async_tensor=True, shard=2), LOW_PRECISION),
    ("mixture", dict(tensor=2, shard=2, expert=2, async_tensor=True), {}),
    ("mixture", dict(tensor=2, shard=2, async_tensor=True, recompute="full"), {}),
    ("latent", dict(tensor=2, async_tensor=True, pipeline=2, schedule="zb-h1"), {}),
    ("dense", dict(tensor=2, recompute="operations", recompute_operations=("ffn",)), {}),
    ("mixture", dict(tensor=2, recompute="operations", recompute_operations=("norm", "attention", "ffn")), {}),
    ("latent", dict(recompute="operations", recompute_operations=("norm", "attention")), LOW_PRECISION),
    ("dense", dict(replicate=2, tensor=2, shard=2, zero=2), dict(dtype="float32")),
    # Context.
    *[("dense", dict(context=4, context_method=method), {}) for method in cases.METHODS],
    *[("latent", dict(context=2, context_method=method), {}) for method in cases.METHODS],
    ("latent", dict(shard=2, context=2, tensor=2, async_tensor=True), dict(microbatch=1)),
    *[("dense", dict(context=2, tensor=2, context_method=method), LOW_PRECISION) for method in cases.METHODS],
    *[("dense", dict(context=2, tensor=2, context_method=method, recompute="attention"), {}) for method in cases.METHODS],
    ("dense", dict(context=2, tensor=2, recompute="full", context_method="ulysses", recompute_every=3), {}),
    ("latent", dict(tensor=2, context=2, context_method="ulysses", recompute="full"), {}),
    ("latent", dict(tensor=2, context=2, context_method="gather", shard=2), {}),
    ("window", dict(context=2), {}),
    ("window", dict(context=4, shard=2), {}),
    ("window", dict(context=2, context_method="gather", recompute="attention"), {}),
    ("window", dict(recompute="attention"), LOW_PRECISION),
    # Pipeline: each schedule with more stages and microbatches, and with fewer microbatches than stages.
    *[("dense", dict(pipeline=2, schedule=schedule), dict(layers=8, microbatch=1)) for schedule in cases.SCHEDULES],
    *[("mixture", dict(pipeline=2, shard=2, expert=2, recompute="full", schedule=schedule), dict(microbatch=1))
      for schedule in cases.SCHEDULES],
    *[("mixture", dict(pipeline=4, schedule="bpipe", shard=2, expert=2) | axes, dict(global_batch=12, microbatch=1) | more)
      for axes, more in BPIPE_EXPERTS],
    *[("dense", dict(pipeline=4, schedule="bpipe") | axes, dict(global_batch=12, microbatch=1) | more) for axes, more in BPIPE],
    *[("dense", dict(pipeline=2, schedule=schedule), dict(global_batch=batch, microbatch=1))
      for schedule in cases.SCHEDULES for batch in ((2, 4, 6) if schedule in BIDIRECTIONAL else (1, 3, 5))],
    *[("mixture", dict(pipeline=2, schedule="dualpipe") | axes, dict(microbatch=1) | more) for axes, more in DUALPIPE],
    *[("dense", dict(pipeline=4, schedule=schedule), dict(layers=8)) for schedule in ("1f1b", "interleaved")],
    ("tied", dict(pipeline=4), {}),
    ("tied", dict(pipeline=2, schedule="zb-v"), {}),
    ("tied", dict(tensor=2, pipeline=2, schedule="zb-v"), {}),
    ("tied", dict(tensor=2, pipeline=2, shard=2), {}),
    ("tied", dict(tensor=2, pipeline=2), LOW_PRECISION),
    ("tied", dict(replicate=2, shard=2, pipeline=2), LOW_PRECISION),
    ("dense", dict(pipeline=2, stages=(1, 3)), {}),
    ("dense", dict(pipeline=2, shard=2, schedule="interleaved", zero=1), dict(layers=8, microbatch=1)),
    ("dense", dict(pipeline=2, shard=2, schedule="zb-v", zero=2), {}),
    ("latent", dict(pipeline=2, recompute="full"), {}),
    ("dense", dict(tensor=2, pipeline=2, shard=2), {}),
    # Experts.
    *[("mixture", dict(shard=4, expert=4, zero=zero), {}) for zero in (1, 2, 3)],
    ("mixture", dict(shard=4, expert=2), LOW_PRECISION | dict(microbatch=1)),
    ("mixture", dict(shard=2, context=2, expert=2, zero=2), {}),
    *[("mixture", dict(shard=2, expert=2, tensor=2, expert_tensor=cut), {}) for cut in (False, True)],
    ("mixture", dict(tensor=2), LOW_PRECISION),
    ("mixture", dict(tensor=2, shard=2, expert=2, expert_tensor=True), LOW_PRECISION),
    ("mixture", dict(tensor=2, shard=2, expert=2, expert_tensor=True), dict(optimizer="muon")),
    ("mixture", dict(tensor=2, shard=4, expert=2, expert_tensor=True), dict(optimizer="muon")),
    ("mixture", dict(context=2, tensor=2, expert=2, shard=2), LOW_PRECISION),
    ("mixture", dict(context=2, tensor=2, expert=4, shard=2, expert_tensor=True), {}),
    ("mixture", dict(context=2, tensor=2, expert=2, recompute="full"), {}),
    ("mixture", dict(recompute="full", recompute_every=2, shard=2, expert=2), {}),
    *[("mixture", dict(replicate=2, shard=2, pipeline=2, expert=2, zero=zero), {}) for zero in (1, 2, 3)],
    ("mixture", dict(pipeline=2, shard=4, expert=2, schedule="dualpipe-v", zero=1, recompute="full"), {}),
    ("softmax", dict(tensor=2, context=2), {}),
    ("softmax", dict(shard=2, tensor=2, expert=2, expert_tensor=True, recompute="full", recompute_every=2), {}),
    ("softmax", dict(replicate=2, shard=2, expert=2), LOW_PRECISION),
    ("capacity", dict(tensor=2, context=2), {}),
    ("capacity", dict(context=2, expert=2), {}),
    ("capacity", dict(shard=2, tensor=2, expert=2, recompute="operations", recompute_operations=("attention", "norm", "ffn")), {}),
    # Muon.
    *[("mixture", layout, dict(optimizer="muon")) for layout in (dict(shard=2), dict(pipeline=2, tensor=2))],
    *[("dense", layout, dict(optimizer="muon")) for layout in (dict(replicate=2), dict(shard=2, zero=1), dict(tensor=2))],
]  # fmt: skip
"""What was once worth a test of its own, and every axis and pair without the company of variants: where a draw has found something,
these say whether it is the axis itself."""
