"""The head of a reward model: a score for each token, from which an objective computes its loss. As with log-probabilities
(`logprobs.py`), the forward pass computes the loss and its gradient with respect to the scores, and only that gradient is kept
besides the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.layers import Gemm, at_least_float32
from shardwise.model.logprobs import Make


class ScoreHead(nn.Module):
    """Hidden states times a matrix of one row. Every tensor-parallel rank holds it, and scores its own slice of the sequence."""

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
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            loss = make(leaf)
            (grad,) = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)
        ctx.save_for_backward(x, weight, head.part(grad).clone())
        ctx.head = head
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, grad = ctx.saved_tensors
        own = (grad * grads[0]).flatten()[:, None].to(x.dtype)
        dx = ctx.head.gemm.multiply(own, weight.to(x.dtype)).view_as(x)
        return dx, ctx.head.gemm.multiply(own.mT, x.flatten(0, 1)).to(weight.dtype), None, None, None
