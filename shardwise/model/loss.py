"""Loss heads: cross-entropies of hidden states, the unembedding matrix and targets, summed over tokens, each times its weight.

`LinearCrossEntropy` is the reference: it holds the logits of all tokens, in float32, and two more such tensors for their gradient.
`ChunkedCrossEntropy` computes the same loss without ever holding them. It takes some thousand tokens at a time, overwrites their
logits with the gradient, and multiplies that into the gradients of the hidden states and of the matrix at once. So the forward
pass does the work of both passes, and holds only one chunk of 16-bit logits. The gradient of the loss itself is not known then,
but it is a scalar, so the backward pass multiplies by it. The objective chooses the divisor of the sum (`train/objectives/`) and
the weights, which are one where None. Targets not to be learned hold PyTorch's `ignore_index`. With `make` a head returns the loss
that `make` computes from the targets' log-probabilities instead (`logprobs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.layers import Gemm, at_least_float32
from shardwise.model.logprobs import IGNORE_INDEX, LogProbHead, Make, add_rows, loss_and_gradient, padded_matrix
from shardwise.run.derive import chunk_rows
from shardwise.torch_private import foreach_mul_

__all__ = ["IGNORE_INDEX", "ChunkedCrossEntropy", "LinearCrossEntropy", "ScoreHead"]


class LinearCrossEntropy(LogProbHead):
    """Logits and loss of all tokens at once."""

    def cross_entropy(self, x: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        logits = at_least_float32(F.linear(x, matrix.to(x.dtype))).flatten(0, 1)
        if weights is None:
            return F.cross_entropy(logits, targets.flatten(), reduction="sum")
        return (F.cross_entropy(logits, targets.flatten(), reduction="none") * weights.flatten()).sum()


class ChunkedCrossEntropy(LogProbHead):
    """Logits and loss of some tokens at a time; the forward pass computes the gradients on the way."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each row [rows, vocabulary]; its gradient overwrites the logits."""
        if logits.is_cuda and logits.dtype != torch.float64:
            from shardwise.model.kernels.cross_entropy import cross_entropy_and_grad_fused

            return cross_entropy_and_grad_fused(logits, targets, IGNORE_INDEX)
        return cross_entropy_and_grad_reference(logits, targets)

    def cross_entropy(self, x: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        tokens = x.flatten(0, 1)
        rows = chunk_rows(len(tokens), self.most_rows(matrix) * x.element_size(), self.chunk_bytes)
        weights = None if weights is None else weights.flatten()
        learns = torch.is_grad_enabled()
        return _Chunked.apply(tokens, matrix, targets.flatten(), weights, rows, self.gemm, self.losses, learns)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        rows: int,
        gemm: Gemm,
        of_logits: Callable[[Tensor, Tensor], Tensor],
        learns: bool,
    ) -> Tensor:
        matrix, vocabulary = padded_matrix(weight, x.dtype), len(weight)
        dtype = at_least_float32(x[:0]).dtype
        loss = torch.zeros((), dtype=dtype, device=x.device)
        dx = torch.empty_like(x) if learns else None
        # Where one chunk makes all of it, it is rounded once either way.
        own = weight.dtype if weight.dtype == torch.bfloat16 and rows >= len(x) else dtype
        dw = torch.empty_like(weight, dtype=own) if learns and ctx.needs_input_grad[1] else None
        for start in range(0, len(x) or 1, rows):
            chunk = slice(start, start + rows)
            logits = gemm.multiply(x[chunk], matrix.mT)
            losses = of_logits(logits[:, :vocabulary], targets[chunk])
            if weights is not None:
                losses = losses * weights[chunk]
                logits *= weights[chunk, None].to(logits.dtype)
            loss += losses.sum()
            if dx is not None:
                gemm.put(logits, matrix, dx[chunk])
            if dw is not None:
                add_rows(gemm, logits, x[chunk], dw, add=start > 0)
            del logits  # otherwise the next chunk's would be allocated beside them
        if dx is not None:
            ctx.save_for_backward(dx, dw)
            ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None, None, None]:
        dx, dw = ctx.saved_tensors
        # In place: nothing else holds them, and the matrix's gradient is one of the largest tensors there are.
        _scale(dx, grads[0])
        if dw is not None:
            _scale(dw, grads[0])
            dw = dw.to(ctx.dtype)
        return dx, dw, None, None, None, None, None, None


def _scale(x: Tensor, factor: Tensor) -> None:
    """Multiply in place by a scalar on the device, which keeps its precision."""
    if x.is_cuda and x.dtype != torch.float64:
        from shardwise.model.kernels.scale import scale_

        scale_(x, factor)
    elif x.element_size() > 2:
        foreach_mul_([x], factor.to(x.dtype))  # several times as fast as `mul_`
    else:
        x.mul_(factor)


def cross_entropy_and_grad_reference(logits: Tensor, targets: Tensor) -> Tensor:
    """The same in plain PyTorch operators."""
    upcast = at_least_float32(logits)
    counted = targets != IGNORE_INDEX
    index = torch.where(counted, targets, 0)[:, None]
    total = upcast.logsumexp(dim=-1, keepdim=True)
    loss = torch.where(counted, (total - upcast.gather(-1, index))[:, 0], 0)
    gradient = (upcast - total).exp_()
    gradient.scatter_add_(-1, index, -torch.ones_like(index, dtype=gradient.dtype))
    logits.copy_(torch.where(counted[:, None], gradient, 0))
    return loss


class ScoreHead(nn.Module):
    """The head of a reward model: hidden states times a matrix of one row give a score for each token, from which an objective
    computes its loss. As with log-probabilities, the forward pass computes the loss and its gradient with respect to the scores,
    and only that gradient is kept besides the inputs. Every tensor-parallel rank holds it, and scores its own slice of the
    sequence."""

    def __init__(self, gemm: Gemm | None = None) -> None:
        super().__init__()
        self.gemm = gemm or Gemm()

    def whole(self, scores: Tensor) -> Tensor:
        """The scores of complete rows, from this rank's slice of them."""
        return scores

    def part(self, whole: Tensor) -> Tensor:
        """This rank's slice of complete rows."""
        return whole

    def forward(
        self, x: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None = None, *, make: Make
    ) -> Tensor:
        """The loss that `make` computes from the scores, which have the shape of the targets."""
        return _OfScores.apply(x, matrix, self, make, torch.is_grad_enabled())


class _OfScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head: ScoreHead, make: Make, learns: bool) -> Tensor:
        scores = at_least_float32(head.gemm.multiply(x.flatten(0, 1), weight.to(x.dtype).mT)).view(x.shape[:2])
        scores = head.whole(scores)
        if not learns:
            return make(scores)
        loss, grad = loss_and_gradient(make, scores)
        ctx.save_for_backward(x, weight, head.part(grad).clone())
        ctx.head = head
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, grad = ctx.saved_tensors
        own = (grad * grads[0]).flatten()[:, None].to(x.dtype)
        dx = ctx.head.gemm.multiply(own, weight.to(x.dtype)).view_as(x)
        return dx, ctx.head.gemm.multiply(own.mT, x.flatten(0, 1)).to(weight.dtype), None, None, None
