"""Computes a result by one function and its gradient by another, nearly equal one: for kernels without a backward pass. The
backward pass recomputes the other function, so only the inputs are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_ordinary_gradient(
    exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *inputs: Tensor | None
) -> Tensor:
    """`exact(*inputs)`, with the gradients of `ordinary(*inputs)`."""
    if not torch.is_grad_enabled():
        return exact(*inputs)
    return _OrdinaryGradient.apply(exact, ordinary, *inputs)


class _OrdinaryGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *inputs: Tensor | None
    ) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                None if x is None else x.detach().requires_grad_(each)
                for x, each in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            out = ctx.ordinary(*inputs)
            found = iter(torch.autograd.grad(out, [x for x in inputs if x is not None and x.requires_grad], grads))
        return None, None, *(next(found) if each else None for each in wanted)
