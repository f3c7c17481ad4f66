"""The file of fitted constants: every chip has its own or names a lender, and the errors it states are within bounds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.hardware import CHIPS
from shardwise.hardware.efficiency import constants, efficiency_file


@pytest.mark.parametrize("kind", ["gemm", "attention", "memory", "collectives"])
def test_every_chip_has_constants(kind: str) -> None:
    table = efficiency_file()[kind]
    assert set(table) == set(CHIPS)
    for chip in CHIPS.values():
        assert constants(kind, chip)


def test_the_fits_are_as_good_as_they_were() -> None:
    gemm = efficiency_file()["gemm"]
    for name in ("a100-sxm-80g", "h100-sxm", "h200-sxm"):
        for entry in gemm[name].values():
            errors = entry["errors"]
            assert errors["large (m >= 1024, n and k >= 512)"]["median"] < 0.04
            assert errors["all"]["median"] < 0.065
            assert errors["all"]["points"] > 9000
    for kernel in ("flash2", "flash3"):
        for entry in efficiency_file()["attention"]["h200-sxm"][kernel].values():
            assert entry["errors"]["chip filled"]["median"] < 0.03
    for name in ("a100-sxm-80g", "h100-sxm"):
        for what, error in efficiency_file()["collectives"][name]["errors"].items():
            assert error["median"] < 0.15 or "below 1 MiB" in what


def test_planning_needs_neither_torch_nor_pyarrow() -> None:
    code = "import sys, shardwise.hardware; assert not {'torch', 'pyarrow', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
