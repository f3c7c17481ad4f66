"""Requirements of individual pipeline schedules. Called by `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwise.run.axes import ASYNCHRONOUS, BIDIRECTIONAL
from shardwise.run.config import Run
from shardwise.run.rules.rule import Rule
from shardwise.run.sections.objective import facts_of

# fmt: off


def schedule_rules(run: Run) -> Iterator[Rule]:
    """The rules of the run's schedule."""
    if run.layout.schedule == "bpipe":
        yield from _bpipe_rules(run)
    elif run.layout.schedule in ASYNCHRONOUS:
        yield from _asynchronous_rules(run)
    elif run.layout.schedule in BIDIRECTIONAL:
        yield from _bidirectional_rules(run)


def _bidirectional_rules(run: Run) -> Iterator[Rule]:
    lay, train, name = run.layout, run.train, run.layout.schedule
    several = lay.pipeline > 1
    yield Rule(several & (lay.pipeline % 2 > 0), "layout.pipeline", ("layout.schedule",), lambda: (
        f"{name} holds each stage on two ranks, so the number of ranks must be even; it is {lay.pipeline}"
    ))
    count = train.global_batch // (train.microbatch * lay.data_ranks)
    yield Rule(several & (count % 2 > 0), "layout.schedule",
               ("train.global_batch", "train.microbatch", "layout.replicate", "layout.shard"), lambda: (
        f"{name} sends half of the microbatches each way, so a step needs an even number; it has {count}"
    ))
    yield Rule(several & lay.offload, "layout.schedule", ("layout.offload",), lambda: (
        f"{name} adds gradients of two ranks on the device, but layout.offload keeps them on the host; use 1f1b or dualpipe-v"
    ))


def _asynchronous_rules(run: Run) -> Iterator[Rule]:
    lay, train, m, name = run.layout, run.train, run.model, run.layout.schedule
    several = lay.pipeline > 1
    batch = train.global_batch // (train.microbatch * lay.data_ranks)
    yield Rule((name == "pipedream-2bw") & several & (batch < lay.pipeline), "layout.schedule",
               ("train.global_batch", "train.microbatch", "layout.pipeline"), lambda: (
        f"pipedream-2bw needs at least as many microbatches per step as layout.pipeline = {lay.pipeline}, and there are {batch}; "
        f"pipedream needs fewer"
    ))
    refused = (
        ("train.clip", train.clip > 0, "clipping needs the norm over all stages, which are never at the same step; set it to 0"),
        ("train.guard", train.guard in ("skip", "rollback"), "it judges a step before the update; use stop or none"),
        ("train.recheck_every", train.recheck_every > 0, "it computes a step twice; set it to 0"),
        ("train.dtype", train.dtype == "float16", "float16 must skip an update on all stages if one overflows; use bfloat16"),
        ("model.tied_embeddings", m.tied_embeddings, "a tied embedding has copies on stages that update at different times"),
        ("model.experts", m.experts > 0, "expert balancing needs all stages at the same step"),
        ("objective.kind", facts_of(run.objective).reference > 0, "a reference model needs all stages at the same step"),
        ("objective.pack", run.objective.kind == "grpo" and run.objective.pack,
         "its updates count microbatches, and packed steps have different numbers of them"),
        ("memory.optimizer", run.memory.hosts_optimizer, "the host updates after the passes of one rank"),
        ("layout.offload", lay.offload, "it keeps only one version of the weights"),
        ("layout.compress", lay.compress != "none", "it needs all stages at the same step"),
        ("layout.sync_every", lay.sync_every > 1, "it needs all stages at the same step"),
        ("layout.secondary_shard", lay.secondary_shard > 1, "it reuses gathered weights for passes that need other versions"),
    )
    for key, wrong, why in refused:
        yield Rule(several & bool(wrong), "layout.schedule", (key,), partial("{} does not go with {}: {}".format, name, key, why))


def _bpipe_rules(run: Run) -> Iterator[Rule]:
    several = run.layout.pipeline > 1
    for used, key in (
        (run.layout.recompute == "optimal", "layout.recompute"),
        (run.memory.swaps, "memory.activations"),
        (run.memory.activation_bits > 0, "memory.activation_bits"),
        (run.memory.lossless, "memory.lossless"),
    ):
        yield Rule(several & used, "layout.schedule", (key,),
                   partial("bpipe moves the tensors that autograd saves, and {} stores some differently; use 1f1b".format, key))
