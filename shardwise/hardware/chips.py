"""Accelerators by name: peak speed and memory as their makers state them, dense (no sparsity).

Sources: NVIDIA data sheets of V100, A100, H100, H200 and B200, AMD data sheets of MI250X and MI300X.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chip:
    """One accelerator: peak FLOP/s by dtype, memory in bytes, and words its driver's name for it contains."""

    name: str
    peak: dict[str, float] = field(hash=False)
    memory: int
    driver_names: tuple[str, ...]


def _chip(name: str, bf16: float, fp16: float, fp32: float, fp64: float, gib: int, *driver_names: str) -> Chip:
    tera = {"bfloat16": bf16, "float16": fp16, "float32": fp32, "float64": fp64}
    return Chip(name, {k: v * 1e12 for k, v in tera.items() if v}, gib * 2**30, driver_names)


# float32 is the rate outside tensor cores, which is what PyTorch uses unless TF32 is asked for.
CHIPS: dict[str, Chip] = {
    c.name: c
    for c in (
        _chip("v100", 0, 125, 15.7, 7.8, 32, "V100"),
        _chip("a100-40", 312, 312, 19.5, 19.5, 40, "A100-SXM4-40GB", "A100-PCIE-40GB"),
        _chip("a100-80", 312, 312, 19.5, 19.5, 80, "A100-SXM4-80GB", "A100 80GB", "A100"),
        _chip("h100-pcie", 756, 756, 51, 51, 80, "H100 PCIe"),
        _chip("h100", 989, 989, 67, 67, 80, "H100"),
        _chip("h200", 989, 989, 67, 67, 141, "H200"),
        _chip("b200", 2250, 2250, 75, 37, 180, "B200"),
        _chip("mi250x", 383, 383, 47.9, 47.9, 128, "MI250X"),
        _chip("mi300x", 1307, 1307, 163.4, 163.4, 192, "MI300X"),
    )
}


def chip_of_driver_name(name: str) -> Chip | None:
    """The chip a driver calls `name`, or None when the catalogue does not know it."""
    return next((chip for chip in CHIPS.values() if any(part in name for part in chip.driver_names)), None)
