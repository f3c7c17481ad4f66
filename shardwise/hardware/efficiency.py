"""How much of a chip's peak its kernels reach: constants fitted to measurements, read from `efficiency.json`.

`benchmarks/fit_hardware.py` writes the file, with the source and the error of each set of constants. A chip without measurements
of its own names the chip whose constants it borrows; since they are relative to peak, memory bandwidth, units and links, they scale
with those. The simplest model that uses them is here too: a kernel that only moves bytes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.hardware.chips import Chip


@cache
def efficiency_file() -> dict[str, Any]:
    """Everything in efficiency.json: for gemm, memory, attention, power and collectives a table by chip name."""
    return json.loads((Path(__file__).parent / "efficiency.json").read_text(encoding="utf-8"))


@cache
def _entry(kind: str, chip_name: str) -> dict[str, Any]:
    table = efficiency_file()[kind]
    entry = table.get(chip_name, {})
    while isinstance(entry, str):
        entry = table[entry]
    return entry


def lender_of(kind: str, chip: Chip) -> str:
    """The name of the chip whose constants of one kind `chip` borrows, or ""."""
    entry = efficiency_file()[kind].get(chip.name)
    return entry if isinstance(entry, str) else ""


def constants(kind: str, chip: Chip) -> dict[str, Any]:
    """The constants of one kind ("gemm", "memory", "attention", "power" or "collectives") for `chip`; {} where there are none."""
    return _entry(kind, chip.lender or chip.name)


def memory_seconds(chip: Chip, bytes: Any, labels: tuple[str, str, str] | None = None) -> Any:
    """Device time of an elementwise kernel, norm, copy or optimizer step that reads and writes `bytes` in all: a start-up time,
    then a steady share of the memory bandwidth, so half of that speed is reached at a few megabytes. Zero bytes take no time.

    `labels` are the operation of the network, its direction and its dtype, for which a profile may have a measurement.
    """
    moved = np.asarray(bytes, dtype=float)
    fitted = constants("memory", chip)["constants"]
    seconds = np.where(moved > 0, fitted["floor"] + moved / (chip.hbm * fitted["share"]), 0.0)
    if chip.profile is not None:
        own = labels is not None and chip.profile.points("elementwise", labels)
        kind, of = ("elementwise", labels) if own else ("memory", ())
        seconds = seconds * chip.profile.factor(kind, of, chip, (moved,), memory_seconds)
    return seconds if seconds.ndim else float(seconds)
