"""AdamW in one pass: every element is read and written once.

It reads the factor on the gradients (clipping, the count of tokens, the loss scale) from the device, so that scaling them needs no
pass of its own. One launch a tensor; it computes in float32 whatever the gradient's dtype. A parameter's compute copy, if there is
one, is written too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WARPS = 4


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    p, g, m, v, copy, factor, size, keep, rate, beta1, beta2, eps, root, COPY: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    first = tl.load(m + at, mask=inside, other=0.0)
    second = tl.load(v + at, mask=inside, other=0.0)
    value = tl.load(p + at, mask=inside, other=0.0)
    first = first + (1.0 - beta1) * (gradient - first)
    second = beta2 * second + (1.0 - beta2) * gradient * gradient
    value = keep * value - rate * first / (tl.sqrt(second) / root + eps)
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    tl.store(p + at, value, mask=inside)
    if COPY:
        tl.store(copy + at, value.to(copy.dtype.element_ty), mask=inside)


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    factor: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    copy: Tensor | None = None,
) -> None:
    """One AdamW update in place, of contiguous tensors, with the gradient times `factor` [1]; `step` counts from 1. The new values
    are written to `copy` as well."""
    size = parameter.numel()
    if not size:
        return
    rate, root = lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5
    target = parameter if copy is None else copy
    _adamw[(triton.cdiv(size, BLOCK),)](
        parameter, gradient, *moments, target, factor, size, 1 - lr * decay, rate, *betas, eps, root,
        copy is not None, BLOCK, num_warps=WARPS,
    )  # fmt: skip
