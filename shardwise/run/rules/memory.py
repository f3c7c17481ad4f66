"""What goes with the section `[memory]`: the rules of `check.py` on what is held off the device."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.run.config import Run
from shardwise.run.derive import splits_backward
from shardwise.run.rules.rule import Rule

# fmt: off


def _saved_rules(run: Run, where: str) -> Iterator[Rule]:
    """What every other form of saved tensors asks of the rest."""
    yield Rule(run.train.compile is True, where, ("train.compile",),
               lambda: "is of tensors that compiled layers do not show; leave train.compile at auto")
    yield Rule(run.train.fp8 != "none", where, ("train.fp8",),
               lambda: "is of inputs as they are, and train.fp8 saves them in 8 bits already")
    yield Rule(run.adapter.used, where, ("adapter.kind",),
               lambda: "is of what full training saves; an adapter leaves most of that out")


def _bits_rules(run: Run) -> Iterator[Rule]:
    """What `memory.activation_bits` asks of the rest."""
    where = "memory.activation_bits"
    yield Rule(run.layout.recompute != "none", where, ("layout.recompute",), lambda: (
        f'is of what layers save, and layout.recompute = "{run.layout.recompute}" saves little of it; use one of the two'
    ))
    yield from _saved_rules(run, where)
    yield Rule(splits_backward(run), where, ("layout.schedule",), lambda: (
        f"is unpacked for a layer's backward pass, and {run.layout.schedule} would keep that for its deferred weight gradients"
    ))


def _swap_rules(run: Run) -> Iterator[Rule]:
    """What `memory.activations` asks of the rest."""
    where = "memory.activations"
    yield Rule(run.memory.activations == "disk" and not run.memory.folder, "memory.folder", (where,),
               lambda: "is where saved activations go with memory.activations = disk: name a folder on a fast disk")
    yield Rule(run.layout.recompute not in ("none", "optimal"), where, ("layout.recompute",), lambda: (
        f'is of what layers save, and layout.recompute = "{run.layout.recompute}" saves little of it; use "optimal", which '
        "chooses for each tensor"
    ))
    yield Rule(run.memory.activation_bits > 0, where, ("memory.activation_bits",),
               lambda: "takes tensors as they are; use one of the two")
    yield from _saved_rules(run, where)
    yield Rule(splits_backward(run), where, ("layout.schedule",), lambda: (
        f"comes back for a layer's backward pass, and {run.layout.schedule} would keep it for its deferred weight gradients"
    ))


def _lossless_rules(run: Run) -> Iterator[Rule]:
    """What `memory.lossless` asks of the rest."""
    where, m = "memory.lossless", run.model
    yield Rule(m.activation != "relu2", where, ("model.activation",), lambda: (
        f"is of what is saved twice, and with model.activation = {m.activation} nothing is; relu2 saves a ReLU and its square"
    ))
    yield Rule(run.layout.recompute != "none", where, ("layout.recompute",), lambda: (
        f'is of what layers save, and layout.recompute = "{run.layout.recompute}" saves little of it; use one of the two'
    ))
    yield Rule(run.memory.swaps or run.memory.activation_bits > 0, where, ("memory.activations", "memory.activation_bits"),
               lambda: "is of tensors that stay as they are; use one of the two")
    yield from _saved_rules(run, where)
    yield Rule(splits_backward(run) or run.layout.schedule == "bpipe", where, ("layout.schedule",), lambda: (
        f"makes a square for a layer's backward pass, and {run.layout.schedule} would keep it for longer; use 1f1b"
    ))


def memory_rules(run: Run) -> Iterator[Rule]:
    """What must hold of a run that holds less on the device."""
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
               lambda: "is where the moments go with memory.optimizer = disk: name a folder on a fast disk")
    yield Rule(lay.world > 1, where, ("layout.shard", "layout.replicate"), lambda: (
        f"the host updates what one device holds, and the layout has {lay.world} ranks; layout.offload shards over them, with "
        "parameters, gradients and optimizer in the hosts' memory"
    ))
    yield Rule(lay.offload, where, ("layout.offload",),
               lambda: "layout.offload has the optimizer in the host's memory already, with the parameters; set one of the two")
    yield Rule(train.optimizer != "adamw", where, ("train.optimizer",),
               lambda: f"the host's threads update by adamw; {train.optimizer} multiplies matrices, which is the device's work")
    yield Rule(run.adapter.used, where, ("adapter.kind",),
               lambda: "adapters have little to update, and nothing of what is frozen; leave it at device")
    yield Rule(train.fp8 != "none", where, ("train.fp8",),
               lambda: "fp8 GEMMs quantise from parameters in high precision, which the device then does not hold")
    yield Rule(train.recheck_every > 0, where, ("train.recheck_every",),
               lambda: "gradients that are computed twice are compared on the device, and here they leave it as they are made")
    yield Rule(run.objective.kind == "grpo", where, ("objective.kind",),
               lambda: "an engine that answers with the trainer's weights would read them while they are updated")
