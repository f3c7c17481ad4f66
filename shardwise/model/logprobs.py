"""Log-probabilities of given tokens, from which an objective computes its loss, without ever holding the logits of all tokens.

The weight of a token's log-probability in the loss is known only when all of them are: a preference loss has terms with the sums
over two documents. So the logits are computed twice, some tokens at a time: in the forward pass for the log-probabilities, and in
the backward pass for their gradient. The forward pass also computes the loss and its gradient with respect to the
log-probabilities. Besides the hidden states, only that gradient and the log-sum-exp of each token stay until the backward pass.

    forward      logits, their log-sum-exp, the logits of the given tokens; then the objective's loss and its gradient g
    backward     logits again; their gradient is g (one-hot - softmax), multiplied into those of the hidden states and the matrix

With a vocabulary sharded over ranks, each rank computes its shard of both (`parallel/tensor.py`): two all-reduces of a few numbers
for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.layers import Gemm, at_least_float32
from shardwise.run.derive import CHUNK_BYTES, LINE, chunk_rows, logit_columns

IGNORE_INDEX = -100

Make = Callable[[Tensor], Tensor]
"""Computes a loss, a sum of terms, from the log-probabilities of targets. They have the targets' shape and are 0 where a target is
`IGNORE_INDEX`. It is called once in a forward pass, on a leaf whose gradient is then computed."""


def padded_matrix(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The unembedding matrix in a dtype, with as many rows as GEMMs are fast with (`logit_columns`), those beyond the vocabulary
    zero. The logits' columns there are zero too, and so are their gradients."""
    lines = logit_columns(len(matrix))
    if lines == len(matrix):
        return matrix.to(dtype)
    padded = matrix.new_empty(lines, matrix.shape[1], dtype=dtype)
    padded[: len(matrix)].copy_(matrix)
    padded[len(matrix) :].zero_()
    return padded


def add_rows(gemm: Gemm, logits: Tensor, x: Tensor, dw: Tensor, add: bool) -> None:
    """Write the gradient of the matrix, from that of padded logits, or add it to `dw`. Rows of an odd vocabulary make a GEMM slow
    too, so the last few are multiplied by themselves."""
    even = len(dw) if logits.shape[1] == len(dw) else len(dw) // LINE * LINE
    for rows in (slice(0, even), slice(even, len(dw))):
        if rows.stop > rows.start:
            gemm.put(logits[:, rows].mT, x, dw[rows], add)


class Logits(nn.Module):
    """Rows of hidden states times the unembedding matrix; a module, so that operation counters see it in the backward pass too."""

    def __init__(self, gemm: Gemm) -> None:
        super().__init__()
        self.gemm = gemm

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        return self.gemm.multiply(x, matrix.mT)


class LogProbHead(nn.Module):
    """The common part of loss heads: a loss computed from log-probabilities. Targets and weights are those of all tokens."""

    start = 0
    """The first token of the vocabulary in this rank's matrix."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, gemm: Gemm | None = None) -> None:
        super().__init__()
        self.gemm, self.chunk_bytes = gemm or Gemm(), chunk_bytes
        self.logits = Logits(self.gemm)

    def most_rows(self, matrix: Tensor) -> int:
        """Vocabulary rows on the rank that has most of them; they decide how tokens are cut into chunks."""
        return len(matrix)

    def over_vocabulary(self, total: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp of each row's logits and the logits of its targets over the whole vocabulary, from those of this
        rank."""
        return total, picked

    def likeliest(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's largest logits over the whole vocabulary and their tokens, from the largest [rows, k] of this rank."""
        return logits, tokens

    def gathered(self, x: Tensor) -> Tensor:
        """The hidden states of all tokens, from this rank's slice of them."""
        return x

    def forward(
        self, x: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None = None, make: Make | None = None
    ) -> Tensor:
        """The summed cross-entropy, or the loss that `make` computes from log-probabilities."""
        x = self.gathered(x)
        if make is not None:
            return self.of_logprobs(x, matrix, targets, make)
        return self.cross_entropy(x, matrix, targets, weights)

    def cross_entropy(self, x: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """The cross-entropy of all tokens, each times its weight, summed."""
        raise NotImplementedError

    @torch.no_grad()
    def top(self, x: Tensor, matrix: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens of hidden states [batch, sequence, width], the likeliest first, and their log-probabilities
        [batch, sequence, k]."""
        x = self.gathered(x)
        hidden, matrix, vocabulary = x.flatten(0, 1), padded_matrix(matrix, x.dtype), len(matrix)
        width = at_least_float32(x[:0]).element_size()
        rows = chunk_rows(len(hidden), self.most_rows(matrix[:vocabulary]) * width, self.chunk_bytes)
        made = []
        for start in range(0, len(hidden), rows):
            logits = at_least_float32(self.logits(hidden[start : start + rows], matrix)[:, :vocabulary])
            largest, place = logits.topk(min(k, vocabulary), dim=-1)
            total = logits.logsumexp(dim=-1)
            del logits
            made.append((total, F.pad(largest, (0, k - largest.shape[1]), value=-torch.inf), place))
        total, largest, place = (torch.cat(each) for each in zip(*made, strict=True))
        tokens = F.pad(place + self.start, (0, k - place.shape[1]))
        total, _ = self.over_vocabulary(total, largest[:, :0])
        largest, tokens = self.likeliest(largest, tokens)
        shape = (*x.shape[:-1], k)
        return tokens.view(shape), (largest - total[:, None]).view(shape)

    def of_logprobs(self, x: Tensor, matrix: Tensor, targets: Tensor, make: Make) -> Tensor:
        """The loss that `make` computes from log-probabilities of targets [batch, sequence], or of several a token [batch,
        sequence, k]."""
        tokens = x.flatten(0, 1)
        width = at_least_float32(x[:0]).element_size()
        rows = chunk_rows(len(tokens), self.most_rows(matrix) * width, self.chunk_bytes)
        return _OfLogProbs.apply(tokens, matrix, targets, self, rows, make, torch.is_grad_enabled())


class _OfLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, head: LogProbHead, rows: int, make: Make, learns: bool
    ) -> Tensor:
        wanted = targets.reshape(len(x), -1)
        matrix, vocabulary = padded_matrix(weight, x.dtype), len(weight)
        dtype = at_least_float32(x[:0]).dtype
        total = torch.empty(len(x), dtype=dtype, device=x.device)
        picked = torch.zeros(wanted.shape, dtype=dtype, device=x.device)
        mine, place = local_places(wanted, head.start, vocabulary)
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            logits = at_least_float32(head.logits(x[chunk], matrix)[:, :vocabulary])
            total[chunk] = logits.logsumexp(dim=-1)
            if vocabulary:
                picked[chunk] = torch.where(mine[chunk], logits.gather(-1, place[chunk]), 0)
            del logits  # otherwise the next chunk's would be allocated beside them
        total, picked = head.over_vocabulary(total, picked)
        counted = wanted != IGNORE_INDEX
        logprobs = torch.where(counted, picked - total[:, None], 0).view(targets.shape)
        if not learns:
            return make(logprobs)
        loss, grad = loss_and_gradient(make, logprobs)
        ctx.save_for_backward(x, weight, total, grad.clone())  # a copy: it may be a view of a larger tensor
        ctx.targets, ctx.head, ctx.rows = targets, head, rows
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        x, weight, total, grad = ctx.saved_tensors
        wanted = ctx.targets.reshape(len(x), -1)
        matrix, vocabulary = padded_matrix(weight, x.dtype), len(weight)
        grad = torch.where(wanted != IGNORE_INDEX, grad.reshape(wanted.shape), 0) * grads[0]
        mine, place = local_places(wanted, ctx.head.start, vocabulary)
        to_input, to_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if to_input else None
        dw = torch.zeros_like(weight, dtype=total.dtype) if to_weight else None
        gemm = ctx.head.gemm
        for start in range(0, len(x), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            padded = ctx.head.logits(x[chunk], matrix)
            narrow = padded[:, :vocabulary]
            logits = at_least_float32(narrow).sub_(total[chunk, None]).exp_().mul_(-grad[chunk].sum(-1, keepdim=True))
            if vocabulary:
                logits.scatter_add_(-1, place[chunk], torch.where(mine[chunk], grad[chunk], 0))
            if logits.dtype != x.dtype:
                narrow.copy_(logits)
            del logits
            if dx is not None:
                gemm.put(padded, matrix, dx[chunk])
            if dw is not None:
                add_rows(gemm, padded, x[chunk], dw, add=start > 0)
            del padded, narrow  # otherwise the next chunk's would be allocated beside them
        return dx, None if dw is None else dw.to(weight.dtype), None, None, None, None, None


def loss_and_gradient(make: Make, values: Tensor) -> tuple[Tensor, Tensor]:
    """The loss that `make` computes, and its gradient with respect to the values."""
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        loss = make(leaf)
        (grad,) = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)
    return loss.detach(), grad


def local_places(targets: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which targets are among `rows` rows of a vocabulary from `start`, and their row index; 0 for the others."""
    local = targets - start
    mine = (local >= 0) & (local < rows)
    return mine, local * mine
