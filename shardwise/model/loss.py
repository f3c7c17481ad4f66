"""The end of the network in training: scores of the vocabulary and their cross-entropy, summed over targets.

`LinearCrossEntropy` is the plain one: it holds the scores of all tokens, in float32, and twice again for their gradient.
`ChunkedCrossEntropy` gives the same loss without ever holding them: it takes some thousand tokens at a time, turns their scores
into the gradient in place, and at once into those of the input and of the matrix, so that the forward pass does the work of
both and a chunk of 16-bit scores is all that stands. Which gradient the loss itself gets is not known then, but it is one
number, by which the backward pass multiplies. Dividing by a count of tokens is left to who knows the whole batch; targets not
to be learned hold the number that PyTorch ignores.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.layers import Gemm, at_least_float32
from shardwise.run.derive import CHUNK_BYTES, chunk_rows

IGNORE_INDEX = -100


class LinearCrossEntropy(nn.Module):
    """Scores and loss of all tokens at once."""

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = at_least_float32(F.linear(x, weight.to(x.dtype)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class ChunkedCrossEntropy(nn.Module):
    """Scores and loss of some tokens at a time, with the gradients made on the way."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, gemm: Gemm | None = None) -> None:
        super().__init__()
        self.chunk_bytes, self.gemm = chunk_bytes, gemm or Gemm()

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        rows = chunk_rows(len(tokens), weight.shape[0] * x.element_size(), self.chunk_bytes)
        return _Chunked.apply(tokens, weight, targets.flatten(), rows, self.gemm)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, gemm: Gemm) -> Tensor:
        matrix = weight.to(x.dtype)
        wide = at_least_float32(x[:0]).dtype
        loss = torch.zeros((), dtype=wide, device=x.device)
        learns = any(ctx.needs_input_grad)
        dx = torch.empty_like(x) if learns else None
        dw = torch.empty_like(matrix, dtype=wide) if learns else None
        first = True
        for some, chosen, back in zip(
            x.split(rows), targets.split(rows), dx.split(rows) if dx is not None else [None] * len(x), strict=False
        ):
            scores = gemm.multiply(some, matrix.mT)
            loss += cross_entropy_and_grad(scores, chosen).sum()
            if back is not None and dw is not None:
                gemm.put(scores, matrix, back)
                gemm.put(scores.mT, some, dw, add=not first)
            first = False
            del scores  # or the next ones would be made beside them
        if dx is not None and dw is not None:
            ctx.save_for_backward(dx, dw)
            ctx.width = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dx, dw = ctx.saved_tensors
        # In place: nothing else holds them, and the matrix's is one of the largest tensors there are.
        torch._foreach_mul_([dw], grads[0].to(dw.dtype))  # several times as fast as `mul_` with a number of the device
        return dx.mul_(grads[0]), dw.to(ctx.width), None, None, None


def cross_entropy_and_grad(scores: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each row [rows, vocabulary]; its gradient takes the place of the scores."""
    if scores.is_cuda and scores.dtype != torch.float64:
        from shardwise.model.kernels.cross_entropy import cross_entropy_and_grad_fused

        return cross_entropy_and_grad_fused(scores, targets, IGNORE_INDEX)
    return cross_entropy_and_grad_reference(scores, targets)


def cross_entropy_and_grad_reference(scores: Tensor, targets: Tensor) -> Tensor:
    """The same, one operation after the other."""
    wide = at_least_float32(scores)
    counted = targets != IGNORE_INDEX
    index = torch.where(counted, targets, 0)[:, None]
    total = wide.logsumexp(dim=-1, keepdim=True)
    loss = torch.where(counted, (total - wide.gather(-1, index))[:, 0], 0)
    gradient = (wide - total).exp_()
    gradient.scatter_add_(-1, index, -torch.ones_like(index, dtype=gradient.dtype))
    scores.copy_(torch.where(counted[:, None], gradient, 0))
    return loss
