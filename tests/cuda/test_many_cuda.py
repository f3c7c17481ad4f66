"""Passes over many tensors on a GPU, which also rounds as PyTorch does: Triton's interpreter cuts bits off."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_many_tensors_are_passed_over_in_one_launch() -> None:
    from many_kernels import check

    check("cuda")


def test_casts_round_to_the_nearest() -> None:
    from shardwise.model.kernels.many import cast

    values = torch.randn(100_000, device="cuda")
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    cast([values], [rounded])
    assert torch.equal(rounded, values.bfloat16())
