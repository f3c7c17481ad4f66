"""How much of a chip's peak its kernels reach: constants fitted to measurements, read from `efficiency.json`.

The file is written by `benchmarks/fit_hardware.py` and says for each set of constants what it was fitted to and how far it
is off. A chip without measurements of its own names the chip whose constants it borrows; since they are relative to peak,
memory bandwidth, units and links, they scale with those.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.hardware.chips import Chip


@cache
def efficiency_file() -> dict[str, Any]:
    """Everything in efficiency.json: for gemm, memory, attention and collectives a table by chip name."""
    return json.loads((Path(__file__).parent / "efficiency.json").read_text(encoding="utf-8"))


@cache
def _entry(kind: str, chip_name: str) -> tuple[str, dict[str, Any]]:
    table = efficiency_file()[kind]
    entry = table[chip_name]
    while isinstance(entry, str):
        chip_name, entry = entry, table[entry]
    return chip_name, entry


def constants(kind: str, chip: Chip) -> dict[str, Any]:
    """The constants of one kind ("gemm", "memory", "attention" or "collectives") that hold for `chip`."""
    return _entry(kind, chip.name)[1]


def borrowed_from(kind: str, chip: Chip) -> str:
    """The chip whose measurements stand in for `chip`'s own, or "" where it has its own."""
    lender = _entry(kind, chip.name)[0]
    return "" if lender == chip.name else lender


def sustained_seen(chip: Chip) -> float:
    """Speed that products kept in a long run without pause, relative to a short one, where that was measured; else 1."""
    return constants("gemm", chip)["bfloat16"].get("sustained", 1.0)
