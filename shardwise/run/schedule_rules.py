"""What single pipeline schedules ask of the rest of a run. A part of `check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shardwise.run.config import Run
from shardwise.run.rule import Rule

# fmt: off


def schedule_rules(run: Run) -> Iterator[Rule]:
    """By the name of the schedule."""
    if run.layout.schedule == "bpipe":
        yield from _bpipe_rules(run)


def _bpipe_rules(run: Run) -> Iterator[Rule]:
    several = run.layout.pipeline > 1
    yield Rule(several & (run.model.experts > 0), "layout.schedule", ("model.experts",), lambda: (
        "bpipe hands saved activations to a partner that must know their size, and what experts save depends on how tokens are "
        "routed; use 1f1b or zb-h1"
    ))
    yield Rule(several & (run.train.fp8 != "none"), "layout.schedule", ("train.fp8",),
               lambda: "bpipe hands over what autograd saves, and fp8 layers keep more beside it; use another schedule")
    for used, key in (
        (run.layout.recompute == "optimal", "layout.recompute"),
        (run.memory.swaps, "memory.activations"),
        (run.memory.activation_bits > 0, "memory.activation_bits"),
    ):
        yield Rule(several & used, "layout.schedule", (key,),
                   partial("bpipe hands over what autograd saves, and {} keeps some of that otherwise; use 1f1b".format, key))
