"""What compressed gradients go with. A part of `check.py`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.run.compression import KEEPS_ERROR
from shardwise.run.config import Run
from shardwise.run.rule import Rule

# fmt: off


def compress_rules(run: Run) -> Iterator[Rule]:
    """What `layout.compress` asks of the rest. The sizes of the layout may be arrays."""
    lay, train = run.layout, run.train
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
