"""What compressed gradients are compatible with. Called by `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwise.run.compression import KEEPS_ERROR
from shardwise.run.config import Run
from shardwise.run.rules.rule import Rule

# fmt: off


def _sync_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `layout.sync_every`."""
    lay, train, every = run.layout, run.train, run.layout.sync_every
    for name, least in (("sync_fragments", 1), ("sync_overlap", 0)):
        value = getattr(lay, name)
        yield Rule(every == 1 and value > least, f"layout.{name}", ("layout.sync_every",), partial(
            "{} has no effect while layout.sync_every is 1: replicas communicate in every step".format, value
        ))
    yield Rule(every == 1 and lay.sync_elastic, "layout.sync_elastic", ("layout.sync_every",),
               lambda: "needs layout.sync_every above 1: at 1, replicas communicate in every step and none can be missing")
    if every == 1:
        return
    if lay.sync_elastic:
        yield from _elastic_rules(run)
    yield Rule(lay.replicate == 1, "layout.sync_every", ("layout.replicate",),
               lambda: f"is {every}, but there is only one replica (layout.replicate = 1); use 1")
    yield Rule(lay.sync_fragments > every, "layout.sync_fragments", ("layout.sync_every",),
               lambda: f"{lay.sync_fragments} fragments need as many steps, and layout.sync_every is {every}; use fewer fragments")
    yield Rule(lay.sync_overlap >= every, "layout.sync_overlap", ("layout.sync_every",), lambda: (
        f"{lay.sync_overlap} must be less than layout.sync_every = {every}, when the next exchange of the same weights starts"
    ))
    yield Rule(lay.compress not in ("none", "int8", "fp8", "int4"), "layout.compress", ("layout.sync_every",), lambda: (
        f"{lay.compress} is for gradients; with layout.sync_every = {every} replicas exchange weights: use int8, fp8, int4 or none"
    ))
    yield Rule(lay.offload, "layout.sync_every", ("layout.offload",),
               lambda: "does not go with layout.offload: it exchanges parameters on the device, and offload keeps them on the host")
    yield Rule(train.dtype == "float16", "layout.sync_every", ("train.dtype",),
               lambda: "does not go with float16: each replica has its own loss scale, and a checkpoint holds one; use bfloat16")
    yield Rule(train.guard == "rollback", "layout.sync_every", ("train.guard",), lambda: (
        "does not go with train.guard = rollback: each replica judges its own loss, and a rollback needs all; use skip or stop"
    ))
    biased = run.model.router == "sigmoid" and run.model.experts > 0 and train.balance_rate > 0
    yield Rule(biased, "layout.sync_every", ("model.router", "train.balance_rate"), lambda: (
        "does not exchange the biases of a sigmoid router, which are not parameters: each replica would balance alone; use "
        "train.balance_rate = 0 or router = softmax"
    ))
    yield Rule(run.objective.kind == "grpo", "layout.sync_every", ("objective.kind",),
               lambda: "does not go with grpo: all replicas generate its answers together")


def _elastic_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `layout.sync_elastic`."""
    lay, train, every = run.layout, run.train, run.layout.sync_every
    yield Rule(lay.compress_warmup > 0, "layout.compress_warmup", ("layout.sync_elastic",), lambda: (
        "must be 0 with layout.sync_elastic: in these steps no replica may leave; train them in a separate run, and start from "
        "its weights (train.weights)"
    ))
    apart = every // max(1, lay.sync_fragments)
    yield Rule(0 < apart <= lay.sync_overlap, "layout.sync_overlap", ("layout.sync_fragments", "layout.sync_elastic"), lambda: (
        f"{lay.sync_overlap} must be less than {apart}, when the exchange of the next fragment starts: with layout.sync_elastic a "
        "replica rejoins between exchanges"
    ))
    between = train.checkpoint_every % every
    yield Rule(between > 0, "train.checkpoint_every", ("layout.sync_every", "layout.sync_elastic"), lambda: (
        f"must be a multiple of layout.sync_every = {every}: with layout.sync_elastic a checkpoint is made after an "
        "exchange"
    ))
    yield Rule(lay.asynchronous, "layout.schedule", ("layout.sync_elastic",), lambda: (
        f"{lay.schedule} does not go with layout.sync_elastic: a replica rejoins between steps, and this schedule overlaps them"
    ))
    yield Rule(train.elastic, "train.elastic", ("layout.sync_elastic",), lambda: (
        "plans another layout if ranks are missing, and layout.sync_elastic continues without them; use one of the two"
    ))


def _shard_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `layout.compress_weights` and `layout.compress_shards`."""
    lay, train = run.layout, run.train
    for name, what in (("compress_weights", "parameters"), ("compress_shards", "gradients")):
        used = getattr(lay, name) != "none"
        yield Rule(used & (lay.shard * lay.context == 1), f"layout.{name}", ("layout.shard", "layout.context"), partial(
            "compresses {} between shards, and there is one shard; layout.compress is for replicas".format, what
        ))
        yield Rule(used and lay.offload, f"layout.{name}", ("layout.offload",),
                   lambda: "does not go with layout.offload: it works on the device, and offload keeps shards on the host")
    yield from _secondary_rules(run)
    weights = lay.compress_weights != "none"
    yield Rule(weights and train.fp8 != "none", "layout.compress_weights", ("train.fp8",),
               lambda: f"train.fp8 = {train.fp8} already gathers matrices in fp8; use one of the two")
    yield Rule(weights and run.adapter.kind == "qlora", "layout.compress_weights", ("adapter.kind",),
               lambda: "has no effect with adapter.kind = qlora, which stores matrices in 4 bits; use none")


def _secondary_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `layout.secondary_shard`. The sizes of the layout may be arrays."""
    lay, few = run.layout, run.layout.secondary_shard
    if few == 1:
        return
    name, ranks = "layout.secondary_shard", lay.shard * lay.context
    yield Rule((ranks % few > 0) | (ranks <= few), name, ("layout.shard", "layout.context"), lambda: (
        f"{few} must divide layout.shard x layout.context = {ranks}, the ranks that parameters are sharded over, "
        f"and be smaller"
    ))
    refused = (
        ("layout.zero", lay.zero != 3, "needs layout.zero = 3, which gathers parameters for both passes"),
        ("layout.offload", lay.offload, "keeps shards on the device, and layout.offload on the host; use one of the two"),
        ("train.fp8", run.train.fp8 != "none", "does not go with train.fp8, which gathers matrices in fp8"),
        ("adapter.kind", run.adapter.kind == "qlora", "has no effect with qlora, which stores matrices in 4 bits; use 1"),
    )
    for key, wrong, why in refused:
        yield Rule(bool(wrong), name, (key,), partial("{}".format, why))


def compress_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `layout.compress`. The sizes of the layout may be arrays."""
    lay, train = run.layout, run.train
    yield from _sync_rules(run)
    yield from _shard_rules(run)
    if lay.compress == "none":
        return
    keeps = lay.compress in KEEPS_ERROR
    yield Rule(lay.replicate == 1, "layout.compress", ("layout.replicate",), lambda: (
        f"{lay.compress} compresses gradients between replicas, but layout.replicate is 1; use none"
    ))
    yield Rule(lay.offload, "layout.compress", ("layout.offload",),
               lambda: f"{lay.compress} works on the device, but layout.offload keeps gradients on the host; use one of the two")
    yield Rule(lay.compress == "onebit" and train.optimizer != "adamw", "layout.compress", ("train.optimizer",),
               lambda: f"onebit sends Adam's momentum, but train.optimizer is {train.optimizer}; powersgd works with any optimizer")
    yield Rule(lay.compress == "onebit" and not lay.compress_warmup, "layout.compress_warmup", ("layout.compress",), lambda: (
        "onebit needs a warm-up, which sets Adam's second moment; 1-bit Adam uses about 15% of the steps"
    ))
    yield Rule(keeps and train.dtype == "float16", "layout.compress", ("train.dtype",), lambda: (
        f"{lay.compress} keeps unsent gradients for the next step, but float16 changes their scale between steps; use "
        "bfloat16, or int8"
    ))
    yield Rule(keeps and train.guard == "skip", "layout.compress", ("train.guard",), lambda: (
        f"{lay.compress} has already stored a bad step's gradients when train.guard = skip refuses them; use rollback or "
        "stop, or int8"
    ))
