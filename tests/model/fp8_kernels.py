"""What `test_fp8.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: the casts to fp8, against
plain PyTorch. Of numbers that the formats hold exactly, since the interpreter does not round as the hardware does."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from shardwise.model.kernels import quantize
from shardwise.model.kernels.quantize import amax_fused, cast_fused, cast_rows_fused, transpose_fused
from shardwise.model.quantized.formats import E4M3, E5M2
from shardwise.model.quantized.scaled import amax_reference, cast_reference, cast_rows_reference, transpose_reference


def same(*pairs: tuple[Tensor, Tensor]) -> None:
    for got, want in pairs:
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        bits = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (got, want))
        assert torch.equal(*bits)


def casts(x: Tensor, kind: torch.dtype) -> None:
    top = amax_fused(x)
    same((top, amax_reference(x)))
    want, scale = cast_reference(x, top, kind)
    for one_pass in (True, False):  # in two where the compiler is at fault
        with mock.patch.object(quantize, "one_pass_is_right", lambda *_, one_pass=one_pass: one_pass):
            plain, turned, got = cast_fused(x, top, kind, True, True)
        same((got, scale), (plain, want), (turned, want.mT.contiguous()))
    assert cast_fused(x, top, kind, False, True)[0].numel() == cast_fused(x, top, kind, True, False)[1].numel() == 0
    same(*zip(transpose_fused(want, scale), transpose_reference(want, scale), strict=True))
    by_row = cast_rows_reference(x, kind)
    same(*zip(cast_rows_fused(x, kind), by_row, strict=True))
    if x.shape[1] < 9000:
        same(*zip(transpose_fused(*by_row), transpose_reference(*by_row), strict=True))


if __name__ == "__main__":
    torch.manual_seed(1)
    shapes = (
        (16, 16, 0, torch.float32), (18, 200, -80, torch.bfloat16), (2, 9000, 60, torch.bfloat16), (700, 40, 0, torch.bfloat16),
    )  # fmt: skip
    for rows, columns, power, dtype in shapes:
        x = torch.randint(-7, 8, (rows, columns)) * 2.0 ** torch.randint(-2, 4, (rows, columns)) * 2.0**power
        for kind in (E4M3, E5M2):
            casts(x.to(dtype), kind)
    x = torch.ones(4, 16)
    for bad in (float("inf"), float("nan")):
        x[1, 3] = bad
        assert not amax_fused(x).isfinite()
        assert not cast_rows_fused(x, E4M3)[1][1].isfinite()
        assert not cast_fused(x, amax_fused(x), E4M3, True, False)[2].isfinite()
