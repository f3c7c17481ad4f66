"""What adapters are compatible with: the rules of `check.py` on the section `[adapter]`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwise.run.config import ModelConfig, Run
from shardwise.run.parameters import Parameter, layer_parameters
from shardwise.run.problems import nearest
from shardwise.run.rules.rule import Rule
from shardwise.run.sections.adapter import MATRICES, NF4_BLOCK

# fmt: off


def adapter_rules(run: Run) -> Iterator[Rule]:
    """Rules of a run with adapters."""
    adapter, train = run.adapter, run.train
    if not adapter.used:
        return
    for word in adapter.targets:
        known = word == "all" or word in MATRICES
        yield Rule(not known, "adapter.targets", (), partial(
            '"{}" is not a matrix of a layer{}; use "all" or some of {}'.format, word, nearest(word, MATRICES), ", ".join(MATRICES)
        ))
    kinds = {run.model.is_moe(layer) for layer in (0, run.model.layers - 1)}
    adapted = [entry for moe in kinds for entry in layer_parameters(run.model, moe, adapter) if entry.adapted]
    yield Rule(not adapted, "adapter.targets", ("adapter.kind",),
               lambda: f"{', '.join(adapter.targets) or 'nothing'}: no layer of this model has such a matrix")
    narrow = min((min(entry.shape[-2:]) for entry in adapted), default=adapter.rank)
    yield Rule(adapter.rank > narrow, "adapter.rank", ("adapter.targets",),
               lambda: f"{adapter.rank} is larger than the smallest side of an adapted matrix, {narrow}")
    if adapter.kind == "qlora":
        yield from _qlora_rules(run)
    yield Rule(train.optimizer != "adamw", "train.optimizer", ("adapter.kind",),
               lambda: f"{train.optimizer} does not train adapters; use adamw")
    yield Rule(train.parametrization != "standard", "train.parametrization", ("adapter.kind",),
               lambda: f"{train.parametrization} is for training all weights; with adapters use standard")
    yield Rule(train.fp8 != "none", "train.fp8", ("adapter.kind",),
               lambda: "fp8 GEMMs do not support frozen weights with adapters; use none")
    yield Rule(train.invariant, "train.invariant", ("adapter.kind",),
               lambda: "does not support adapters: a server merges them into the weights, which rounds differently; leave it off")


def _qlora_rules(run: Run) -> Iterator[Rule]:
    """What 4-bit matrices are compatible with."""
    wrong = [entry.name for entry in _matrices(run.model) if entry.shape[-1] % NF4_BLOCK]
    yield Rule(bool(wrong), "adapter.kind", ("model.hidden", "model.ffn", "model.expert_ffn"), lambda: (
        f"qlora stores rows in blocks of {NF4_BLOCK} weights; the rows of {', '.join(wrong)} are not a multiple of {NF4_BLOCK}"
    ))
    yield Rule(run.train.compile is True, "train.compile", ("adapter.kind",),
               lambda: "qlora cannot be compiled: it unpacks its matrices for each GEMM; use auto")


def _matrices(model: ModelConfig) -> list[Parameter]:
    """The matrices of a network's layers that qlora stores in 4 bits."""
    kinds = {model.is_moe(layer) for layer in (0, model.layers - 1)}
    found = {entry.name: entry for moe in kinds for entry in layer_parameters(model, moe)}
    return [entry for entry in found.values() if entry.is_linear or entry.routed]


def adapter_layout_rules(run: Run) -> Iterator[Rule]:
    """Rules between adapters and the layout. The sizes of the layout may be arrays."""
    model, lay = run.model, run.layout
    kind = run.adapter.kind
    if kind not in ("dora", "qlora"):
        return
    cut = [entry for entry in _matrices(model) if entry.tensor_dim == len(entry.shape) - 1]
    for entry in cut if kind == "qlora" else ():
        uneven = (lay.tensor > 1) & (entry.shape[-1] % (NF4_BLOCK * lay.tensor) > 0)
        yield Rule(uneven & lay.expert_tensor if entry.routed else uneven, "layout.tensor", ("adapter.kind",), partial(
            "{} ranks split the rows of {} (length {}) inside of qlora's blocks of {} weights".format,
            lay.tensor, entry.name, entry.shape[-1], NF4_BLOCK
        ))
    yield Rule(lay.async_tensor, "layout.async_tensor", ("adapter.kind",),
               lambda: f"{kind} does not support async_tensor; turn it off")
    yield Rule((model.attention == "grouped") & (lay.tensor > model.kv_heads), "layout.tensor", ("adapter.kind", "model.kv_heads"),
               lambda: f"{kind} needs a whole key/value head per tensor rank; {lay.tensor} ranks share {model.kv_heads} heads")
