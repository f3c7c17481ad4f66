"""Casts the input of a GEMM to fp8, with a scale for each row, in one pass with the operation before it: the norm of the residual
stream, or the gated product. Scales are powers of two, as in `model/quantized/scaled.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.gated import activated
from shardwise.model.kernels.quantize import _bits, _exponent, _factor, _scale, top


@triton.jit
def _fp8_rows(  # type: ignore[no-untyped-def]
    X, NORM, OUT, SCALES, width, x0, eps,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N)
    inside = at < width
    dtype = X.dtype.element_ty
    x = tl.load(X + row * x0 + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(X + row * x0 + width + at, mask=inside, other=0.0).to(tl.float32)
        x = (activated(x, SILU, dtype) * up).to(dtype).to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(x * x) / width + eps)
        x = (x * rms * tl.load(NORM + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    bits = tl.max(_bits(x))
    exponent = _exponent(bits, TOP)
    tl.store(SCALES + row, _scale(bits, exponent))
    tl.store(OUT + row * width + at, (x * _factor(exponent)).to(OUT.dtype.element_ty), mask=inside)


def fp8_rows(x: Tensor, norm: tuple[Tensor, float] | None = None, gated: str = "") -> tuple[Tensor, Tensor]:
    """Rows in fp8 and their scales [rows, 1]: of an RMSNorm of `x` with this weight and epsilon, of the gated product of its two
    halves ("silu" or "gelu" of the first), or of `x` itself."""
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    weight, eps = norm if norm is not None else (x, 0.0)
    block = triton.next_power_of_2(width)
    _fp8_rows[(rows,)](
        x, weight, out, scales, width, x.stride(0), eps, HAS_NORM=norm is not None, GATED=bool(gated), SILU=gated == "silu",
        TOP=top(torch.float8_e4m3fn), N=block, num_warps=min(16, max(4, block // 1024)),
    )  # fmt: skip
    return out, scales
