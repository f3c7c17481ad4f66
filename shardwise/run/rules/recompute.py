"""What recomputation is compatible with. Called by `check.py`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.run.config import Run
from shardwise.run.derive import REPEATS_PARTS, splits_backward
from shardwise.run.rules.rule import Rule

# fmt: off


def _optimal_rules(run: Run) -> Iterator[Rule]:
    """Requirements of recomputing single tensors."""
    chosen = ("layout.recompute",)
    yield Rule(run.train.fp8 != "none", "train.fp8", chosen, lambda: (
        'fp8 does not go with layout.recompute = "optimal", which recomputes 16-bit inputs; use "budget"'
    ))
    yield Rule(run.adapter.used, "adapter.kind", chosen, lambda: (
        'adapters do not go with layout.recompute = "optimal"; use "budget"'
    ))
    yield Rule(splits_backward(run), "layout.schedule", chosen, lambda: (
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
    yield Rule(splits_backward(run) & (run.train.compile is True), "train.compile", ("layout.schedule",), lambda: (
        f'compiles whole layers, but layout.schedule = "{lay.schedule}" defers their weight gradients; use another schedule'
    ))
    yield Rule((mode in ("budget", "optimal")) != (lay.recompute_budget > 0), "layout.recompute_budget", ("layout.recompute",),
               lambda: 'must be above 0 if layout.recompute is "budget" or "optimal", and 0 otherwise')
    if mode == "optimal":
        yield from _optimal_rules(run)
