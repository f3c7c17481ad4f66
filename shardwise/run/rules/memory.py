"""What recomputation and the section `[memory]` are compatible with: the rules of `check.py` on what layers save for the backward
pass, and on state held off the device."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.run.config import Run
from shardwise.run.derive import REPEATS_PARTS
from shardwise.run.rules.rule import Rule

# fmt: off


def _saved_rules(run: Run, where: str) -> Iterator[Rule]:
    """Requirements shared by all special forms of saved tensors."""
    yield Rule(run.train.compile is True, where, ("train.compile",),
               lambda: "does not support compiled layers; leave train.compile at auto")
    yield Rule(run.train.fp8 != "none", where, ("train.fp8",),
               lambda: "does not go with train.fp8, which already saves inputs in 8 bits")
    yield Rule(run.adapter.used, where, ("adapter.kind",),
               lambda: "is for full training; with adapters there is little to save")


def _bits_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `memory.activation_bits`."""
    where = "memory.activation_bits"
    yield Rule(run.layout.recompute != "none", where, ("layout.recompute",), lambda: (
        f'is for what layers save, but layout.recompute = "{run.layout.recompute}" saves little of it; use one of the two'
    ))
    yield from _saved_rules(run, where)
    yield Rule(run.layout.splits_backward, where, ("layout.schedule",), lambda: (
        f"does not go with {run.layout.schedule}, which would keep the unpacked tensors for its deferred weight gradients"
    ))


def _swap_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `memory.activations`."""
    where = "memory.activations"
    yield Rule(run.memory.activations == "disk" and not run.memory.folder, "memory.folder", (where,),
               lambda: "memory.activations = disk needs a folder on a fast disk for saved activations")
    yield Rule(run.layout.recompute not in ("none", "optimal"), where, ("layout.recompute",), lambda: (
        f'is for what layers save, but layout.recompute = "{run.layout.recompute}" saves little of it; use "optimal", which '
        "chooses for each tensor"
    ))
    yield Rule(run.memory.activation_bits > 0, where, ("memory.activation_bits",),
               lambda: "does not go with memory.activation_bits; use one of the two")
    yield from _saved_rules(run, where)
    yield Rule(run.layout.splits_backward, where, ("layout.schedule",), lambda: (
        f"does not go with {run.layout.schedule}, which would keep the tensors on the device for its deferred weight gradients"
    ))


def _lossless_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `memory.lossless`."""
    where, m = "memory.lossless", run.model
    yield Rule(m.activation != "relu2", where, ("model.activation",), lambda: (
        f"is for model.activation = relu2, which saves a ReLU and its square; {m.activation} saves nothing twice"
    ))
    yield Rule(run.layout.recompute != "none", where, ("layout.recompute",), lambda: (
        f'is for what layers save, but layout.recompute = "{run.layout.recompute}" saves little of it; use one of the two'
    ))
    yield Rule(run.memory.swaps or run.memory.activation_bits > 0, where, ("memory.activations", "memory.activation_bits"),
               lambda: "does not go with memory.activations and memory.activation_bits; use one of them")
    yield from _saved_rules(run, where)
    yield Rule(run.layout.splits_backward, where, ("layout.schedule",), lambda: (
        f"computes the square again for the backward pass, and {run.layout.schedule} would keep it longer; use 1f1b"
    ))


def memory_rules(run: Run) -> Iterator[Rule]:
    """Rules of a run that holds less on the device."""
    lay, train = run.layout, run.train
    if run.memory.activation_bits:
        yield from _bits_rules(run)
    if run.memory.swaps:
        yield from _swap_rules(run)
    if run.memory.lossless:
        yield from _lossless_rules(run)
    if not run.memory.hosts_optimizer:
        return
    where = "memory.optimizer"
    yield Rule(run.memory.on_disk and not run.memory.folder, "memory.folder", (where,),
               lambda: "memory.optimizer = disk needs a folder on a fast disk for the moments")
    yield Rule(lay.world > 1, where, ("layout.shard", "layout.replicate"), lambda: (
        f"works for one device, and the layout has {lay.world} ranks; use layout.offload, which shards parameters, gradients and "
        "optimizer state over the hosts' memory"
    ))
    yield Rule(lay.offload, where, ("layout.offload",),
               lambda: "layout.offload already keeps the optimizer state in host memory; use one of the two")
    yield Rule(train.optimizer != "adamw", where, ("train.optimizer",),
               lambda: f"the host updates only with adamw, not with {train.optimizer}")
    yield Rule(run.adapter.used, where, ("adapter.kind",),
               lambda: "adapters have little optimizer state; use device")
    yield Rule(train.fp8 != "none", where, ("train.fp8",),
               lambda: "fp8 GEMMs need the high-precision parameters on the device; use one of the two")
    yield Rule(train.recheck_every > 0, where, ("train.recheck_every",),
               lambda: "train.recheck_every compares gradients on the device, and here they leave it at once; set it to 0")
    yield Rule(run.objective.kind == "grpo", where, ("objective.kind",),
               lambda: "does not go with grpo: its engine would read weights during their update; use device")


def _optimal_rules(run: Run) -> Iterator[Rule]:
    """Requirements of recomputing single tensors."""
    chosen = ("layout.recompute",)
    yield Rule(run.train.fp8 != "none", "train.fp8", chosen, lambda: (
        'fp8 does not go with layout.recompute = "optimal", which recomputes 16-bit inputs; use "budget"'
    ))
    yield Rule(run.adapter.used, "adapter.kind", chosen, lambda: (
        'adapters do not go with layout.recompute = "optimal"; use "budget"'
    ))
    yield Rule(run.layout.splits_backward, "layout.schedule", chosen, lambda: (
        f'{run.layout.schedule} keeps inputs for its deferred weight gradients, which layout.recompute = "optimal" would drop; use '
        '"budget"'
    ))


def recompute_rules(run: Run) -> Iterator[Rule]:
    """Requirements of `layout.recompute`. The sizes of the layout may be arrays."""
    lay, mode, parts = run.layout, run.layout.recompute, run.layout.recompute_operations
    wrong = (mode == "operations") != bool(parts) or any(word not in ("attention", "norm", "ffn") for word in parts)
    yield Rule(wrong, "layout.recompute_operations", ("layout.recompute",), lambda: (
        'must name parts of a layer ("attention", "norm", "ffn") if layout.recompute is "operations", and be empty otherwise'
    ))
    alone = lay.async_tensor and mode == "operations" and "ffn" in parts
    yield Rule(alone, "layout.async_tensor", ("layout.recompute", "layout.recompute_operations"), lambda: (
        'does not go with recompute_operations = "ffn": it gathers the sequence outside of the feed-forward layer; use '
        'recompute = "full", or leave "ffn" out'
    ))
    yield Rule(run.train.compile is True and mode in REPEATS_PARTS, "train.compile", ("layout.recompute",), lambda: (
        f'compiles whole layers, but layout.recompute = "{mode}" recomputes parts of a layer; use "full" or "none"'
    ))
    yield Rule(run.layout.splits_backward & (run.train.compile is True), "train.compile", ("layout.schedule",), lambda: (
        f'compiles whole layers, but layout.schedule = "{lay.schedule}" defers their weight gradients; use another schedule'
    ))
    yield Rule((mode in ("budget", "optimal")) != (lay.recompute_budget > 0), "layout.recompute_budget", ("layout.recompute",),
               lambda: 'must be above 0 if layout.recompute is "budget" or "optimal", and 0 otherwise')
    if mode == "optimal":
        yield from _optimal_rules(run)
