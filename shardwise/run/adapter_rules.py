"""What adapters go with: the rules of `check.py` on the section `[adapter]`. Each is whether it is broken, its key, the other keys
it speaks of, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from shardwise.run.adapter_config import MATRICES
from shardwise.run.config import Run
from shardwise.run.parameters import layer_parameters
from shardwise.run.problems import nearest

Rule = tuple[Any, str, tuple[str, ...], Callable[[], str]]

# fmt: off


def adapter_rules(run: Run) -> Iterator[Rule]:
    """What must hold of a run with adapters."""
    adapter, train = run.adapter, run.train
    if not adapter.used:
        return
    for word in adapter.targets:
        known = word == "all" or word in MATRICES
        yield (not known, "adapter.targets", (), partial(
            '"{}" is not a matrix of a layer{}; "all", or some of {}'.format, word, nearest(word, MATRICES), ", ".join(MATRICES)
        ))
    kinds = {run.model.is_moe(layer) for layer in (0, run.model.layers - 1)}
    adapted = [entry for moe in kinds for entry in layer_parameters(run.model, moe, adapter) if entry.adapted]
    yield (not adapted, "adapter.targets", ("adapter.kind",),
           lambda: f"{', '.join(adapter.targets) or 'nothing'}: no layer of this network has such a matrix")
    narrow = min((min(entry.shape[-2:]) for entry in adapted), default=adapter.rank)
    yield (adapter.rank > narrow, "adapter.rank", ("adapter.targets",),
           lambda: f"{adapter.rank} is more than the {narrow} rows or columns of a matrix that it adapts")
    yield (train.optimizer != "adamw", "train.optimizer", ("adapter.kind",),
           lambda: f"{train.optimizer} is for whole matrices; adapters are trained by adamw")
    yield (train.fp8 != "none", "train.fp8", ("adapter.kind",),
           lambda: "has no GEMMs for frozen weights with adapters; leave it at none")
    yield (train.invariant, "train.invariant", ("adapter.kind",),
           lambda: "has no GEMMs for adapters: a server merges them, which rounds otherwise")
