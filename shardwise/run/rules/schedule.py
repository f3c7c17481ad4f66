"""What single pipeline schedules ask of the rest of a run. A part of `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwise.run.axes import ASYNCHRONOUS, BIDIRECTIONAL
from shardwise.run.config import Run
from shardwise.run.rules.rule import Rule
from shardwise.run.sections.objective import facts_of

# fmt: off


def schedule_rules(run: Run) -> Iterator[Rule]:
    """By the name of the schedule."""
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
        f"{name} lets microbatches enter at both ends, so that two ranks hold the same stages: {lay.pipeline} must be an even "
        f"number"
    ))
    count = train.global_batch // (train.microbatch * lay.data_ranks)
    yield Rule(several & (count % 2 > 0), "layout.schedule",
               ("train.global_batch", "train.microbatch", "layout.replicate", "layout.shard"), lambda: (
        f"{name} sends half of the microbatches each way, and a step has {count}: it must be an even number"
    ))
    yield Rule(several & lay.offload, "layout.schedule", ("layout.offload",), lambda: (
        f"{name} adds gradients of two ranks on their devices, and layout.offload keeps them on the host; use 1f1b or dualpipe-v"
    ))


def _asynchronous_rules(run: Run) -> Iterator[Rule]:
    lay, train, m, name = run.layout, run.train, run.model, run.layout.schedule
    several = lay.pipeline > 1
    batch = train.global_batch // (train.microbatch * lay.data_ranks)
    yield Rule((name == "pipedream-2bw") & several & (batch < lay.pipeline), "layout.schedule",
               ("train.global_batch", "train.microbatch", "layout.pipeline"), lambda: (
        f"pipedream-2bw has two versions of weights, which suffice from as many microbatches a step as ranks: {batch} are fewer "
        f"than layout.pipeline = {lay.pipeline}; pipedream keeps more versions"
    ))
    refused = (
        ("train.clip", train.clip > 0, "clips by the norm over all stages, which are never at the same step; set it to 0"),
        ("train.guard", train.guard in ("skip", "rollback"), "judges a step before it is updated; use stop or none"),
        ("train.recheck_every", train.recheck_every > 0, "computes the same step twice; set it to 0"),
        ("train.dtype", train.dtype == "float16", "float16 skips updates that overflow on any stage; use bfloat16"),
        ("model.tied_embeddings", m.tied_embeddings, "a tied embedding has two copies, on stages that update at different times"),
        ("model.experts", m.experts > 0, "balances experts over a step of all stages"),
        ("objective.kind", facts_of(run.objective).reference > 0, "compares with a reference that all stages are at"),
        ("memory.optimizer", run.memory.hosts_optimizer, "updates on the host behind the passes of one rank"),
        ("layout.offload", lay.offload, "keeps one version of the weights on the host"),
        ("layout.compress", lay.compress != "none", "exchanges gradients behind a step of all stages"),
        ("layout.sync_every", lay.sync_every > 1, "exchanges weights behind a step of all stages"),
        ("layout.secondary_shard", lay.secondary_shard > 1, "keeps what a pass gathered for others, which use other versions"),
    )
    for key, wrong, why in refused:
        yield Rule(several & bool(wrong), "layout.schedule", (key,), partial("{} does not go with {}: {}".format, name, key, why))


def _bpipe_rules(run: Run) -> Iterator[Rule]:
    several = run.layout.pipeline > 1
    for used, key in (
        (run.layout.recompute == "optimal", "layout.recompute"),
        (run.memory.swaps, "memory.activations"),
        (run.memory.activation_bits > 0, "memory.activation_bits"),
    ):
        yield Rule(several & used, "layout.schedule", (key,),
                   partial("bpipe hands over what autograd saves, and {} keeps some of that otherwise; use 1f1b".format, key))
