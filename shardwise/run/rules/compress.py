"""What compressed gradients go with. A part of `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwise.run.compression import KEEPS_ERROR
from shardwise.run.config import Run
from shardwise.run.rules.rule import Rule

# fmt: off


def _sync_rules(run: Run) -> Iterator[Rule]:
    """What `layout.sync_every` asks of the rest."""
    lay, train, every = run.layout, run.train, run.layout.sync_every
    for name, least in (("sync_fragments", 1), ("sync_overlap", 0)):
        value = getattr(lay, name)
        yield Rule(every == 1 and value > least, f"layout.{name}", ("layout.sync_every",), partial(
            "{} has no meaning while layout.sync_every is 1: replicas communicate in every step".format, value
        ))
    yield Rule(every == 1 and lay.sync_elastic, "layout.sync_elastic", ("layout.sync_every",),
               lambda: "has no meaning while layout.sync_every is 1: replicas speak in every step, and none can be missed")
    if every == 1:
        return
    if lay.sync_elastic:
        yield from _elastic_rules(run)
    yield Rule(lay.replicate == 1, "layout.sync_every", ("layout.replicate",),
               lambda: f"{every} steps between exchanges of replicas, and layout.replicate is 1")
    yield Rule(lay.sync_fragments > every, "layout.sync_fragments", ("layout.sync_every",),
               lambda: f"{lay.sync_fragments} fragments are exchanged at different steps, and layout.sync_every = {every}")
    yield Rule(lay.sync_overlap >= every, "layout.sync_overlap", ("layout.sync_every",), lambda: (
        f"{lay.sync_overlap} steps underway, and the next exchange of the same weights is due after {every}; give fewer"
    ))
    yield Rule(lay.compress not in ("none", "int8", "fp8", "int4"), "layout.compress", ("layout.sync_every",), lambda: (
        f"{lay.compress} is made for gradients; what replicas exchange every {every} steps goes in int8, fp8 or int4, or as it is"
    ))
    yield Rule(lay.offload, "layout.sync_every", ("layout.offload",),
               lambda: "exchanges parameters where they are computed with, and layout.offload keeps them on the host")
    yield Rule(train.dtype == "float16", "layout.sync_every", ("train.dtype",),
               lambda: "lets every replica overflow by itself, and a checkpoint holds one loss scale; use bfloat16")
    yield Rule(train.guard == "rollback", "layout.sync_every", ("train.guard",), lambda: (
        "lets every replica judge its own loss, and train.guard = rollback must be decided by all; use skip or stop"
    ))
    biased = run.model.router == "sigmoid" and run.model.experts > 0 and train.balance_rate > 0
    yield Rule(biased, "layout.sync_every", ("model.router", "train.balance_rate"), lambda: (
        "exchanges parameters, and the selection biases of a sigmoid router are none: each replica would balance by itself; use "
        "train.balance_rate = 0, or router = softmax"
    ))
    yield Rule(run.objective.kind == "grpo", "layout.sync_every", ("objective.kind",),
               lambda: "goes with learning from fixed data: the answers of grpo are made by all replicas together")


def _elastic_rules(run: Run) -> Iterator[Rule]:
    """What `layout.sync_elastic` asks of the rest."""
    lay, train, every = run.layout, run.train, run.layout.sync_every
    yield Rule(lay.compress_warmup > 0, "layout.compress_warmup", ("layout.sync_elastic",), lambda: (
        "lets replicas train as one, and with layout.sync_elastic any of them may leave; train these steps in a run of their own, "
        "and begin with its weights (train.weights)"
    ))
    apart = every // max(1, lay.sync_fragments)
    yield Rule(0 < apart <= lay.sync_overlap, "layout.sync_overlap", ("layout.sync_fragments", "layout.sync_elastic"), lambda: (
        f"{lay.sync_overlap} steps underway, and the next fragment is due after {apart}: a replica that rejoins "
        "(layout.sync_elastic) does so when nothing is underway; give fewer"
    ))
    between = train.checkpoint_every % every
    yield Rule(between > 0, "train.checkpoint_every", ("layout.sync_every", "layout.sync_elastic"), lambda: (
        f"with layout.sync_elastic a checkpoint is of one replica, made where all have spoken: use a multiple of {every} "
        "(layout.sync_every)"
    ))
    yield Rule(lay.asynchronous, "layout.schedule", ("layout.sync_elastic",), lambda: (
        f"{lay.schedule} always has steps underway, and a replica that rejoins (layout.sync_elastic) needs one that has none"
    ))
    yield Rule(train.elastic, "train.elastic", ("layout.sync_elastic",), lambda: (
        "plans another layout where ranks are missing, and layout.sync_elastic goes on without them; use one of the two"
    ))


def _shard_rules(run: Run) -> Iterator[Rule]:
    """What `layout.compress_weights` and `layout.compress_shards` ask of the rest."""
    lay, train = run.layout, run.train
    for name, what in (("compress_weights", "parameters"), ("compress_shards", "gradients")):
        used = getattr(lay, name) != "none"
        yield Rule(used & (lay.shard * lay.context == 1), f"layout.{name}", ("layout.shard", "layout.context"), partial(
            "is how {} travel between shards, and layout.shard is 1; layout.compress is between replicas".format, what
        ))
        yield Rule(used and lay.offload, f"layout.{name}", ("layout.offload",),
                   lambda: "is computed on the device, and layout.offload keeps shards on the host")
    yield from _secondary_rules(run)
    weights = lay.compress_weights != "none"
    yield Rule(weights and train.fp8 != "none", "layout.compress_weights", ("train.fp8",),
               lambda: f"train.fp8 = {train.fp8} gathers its matrices in fp8 already; use one of the two")
    yield Rule(weights and run.adapter.kind == "qlora", "layout.compress_weights", ("adapter.kind",),
               lambda: "has nothing to do where adapter.kind = qlora keeps the matrices in 4 bits")


def _secondary_rules(run: Run) -> Iterator[Rule]:
    """What `layout.secondary_shard` asks of the rest. The sizes of the layout may be arrays."""
    lay, few = run.layout, run.layout.secondary_shard
    if few == 1:
        return
    name, ranks = "layout.secondary_shard", lay.shard * lay.context
    yield Rule((ranks % few > 0) | (ranks <= few), name, ("layout.shard", "layout.context"), lambda: (
        f"{few} is no part of layout.shard x layout.context = {ranks}: it must divide the ranks that parameters are sharded over, "
        f"and be fewer"
    ))
    refused = (
        ("layout.zero", lay.zero != 3, "is about parameters that are gathered for both passes, as zero = 3 does"),
        ("layout.offload", lay.offload, "keeps shards on the device, and layout.offload has them on the host"),
        ("train.fp8", run.train.fp8 != "none", "keeps what was gathered as it is, and matrices of fp8 GEMMs are gathered in fp8"),
        ("adapter.kind", run.adapter.kind == "qlora", "has nothing to do where qlora keeps the matrices in 4 bits"),
    )
    for key, wrong, why in refused:
        yield Rule(bool(wrong), name, (key,), partial("{}".format, why))


def compress_rules(run: Run) -> Iterator[Rule]:
    """What `layout.compress` asks of the rest. The sizes of the layout may be arrays."""
    lay, train = run.layout, run.train
    yield from _sync_rules(run)
    yield from _shard_rules(run)
    late = lay.compress in ("powersgd", "topk")
    yield Rule(lay.compress_frozen and not late, "layout.compress_frozen", ("layout.compress",), lambda: (
        f"is for powersgd and topk, which bring gradients late, and layout.compress is {lay.compress}"
    ))
    yield Rule(lay.compress_frozen and late and train.optimizer != "adamw", "layout.compress_frozen", ("train.optimizer",),
               lambda: f"is about Adam's second moment, and train.optimizer is {train.optimizer}")
    yield Rule(lay.compress_frozen and late and not lay.compress_warmup, "layout.compress_warmup", ("layout.compress_frozen",),
               lambda: "Adam's second moment stays as the warm-up leaves it, and there is none; give it some 15% of the steps")
    if lay.compress == "none":
        return
    keeps = lay.compress in KEEPS_ERROR
    yield Rule(lay.replicate == 1, "layout.compress", ("layout.replicate",), lambda: (
        f"{lay.compress} is how replicas exchange gradients, and layout.replicate is 1"
    ))
    yield Rule(lay.offload, "layout.compress", ("layout.offload",),
               lambda: f"{lay.compress} is computed where the gradients are, and layout.offload keeps those on the host")
    yield Rule(lay.compress == "onebit" and train.optimizer != "adamw", "layout.compress", ("train.optimizer",),
               lambda: f"onebit sends Adam's momentum, and train.optimizer is {train.optimizer}; powersgd goes with any")
    yield Rule(lay.compress == "onebit" and not lay.compress_warmup, "layout.compress_warmup", ("layout.compress",), lambda: (
        "onebit keeps Adam's second moment as the warm-up leaves it, and there is none; 1-bit Adam takes some 15% of the steps"
    ))
    yield Rule(keeps and train.dtype == "float16", "layout.compress", ("train.dtype",), lambda: (
        f"{lay.compress} keeps what was not sent for the next step, and float16 changes the scale of gradients between steps; use "
        "bfloat16, or int8"
    ))
    yield Rule(keeps and train.guard == "skip", "layout.compress", ("train.guard",), lambda: (
        f"{lay.compress} has put a bad step's gradients into what it keeps before train.guard = skip refuses them; use rollback or "
        "stop, or int8"
    ))
