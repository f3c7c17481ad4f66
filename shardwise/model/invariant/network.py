"""Batch invariance: a token's hidden states, logits and logprobs have the same bits whatever else is in the forward pass, and
however its sequence is split: one token from a cache, in a chunk, or complete among packed documents as in training.

Adding numbers in another order gives other bits, and the order that a library takes depends on shapes. So every sum gets a fixed
order. On a GPU in 16 bits, kernels do that (`kernels/attention/invariant.py`, `kernels/gemm/invariant*.py`). On a CPU, matrices
are multiplied in blocks of a fixed number of rows. Everything other than sums and products of two numbers is computed row by row,
since a vector's last elements may be computed differently from the rest. Attention takes blocks of positions (`attention.py`).
Latent attention is always computed over latents. The bits hold for one kind of device, library and number of threads.

`make_invariant` puts these operations into a network, for serving and for training. Their gradients are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.attention import DotProductAttention, LatentAttention, multiply_by_head
from shardwise.model.invariant.attention import InvariantMaskBuilder, attend_documents, with_ordinary_gradient
from shardwise.model.layers import FeedForward, Gemm, Linear, Norm, at_least_float32, gated, normalize
from shardwise.model.logprobs import IGNORE_INDEX, Make
from shardwise.model.moe.layer import Experts, MoE, ReadCounts, Router, grouped_linear, router_logits
from shardwise.model.moe.router_gemm import in_parts
from shardwise.model.rope import rope_cos_sin
from shardwise.model.transformer import Transformer
from shardwise.run import ModelConfig, Problem, Run, UserError

ROWS = 16
"""Rows of a block on a CPU. Reading the matrix takes longer than multiplying this many."""


def check_invariant(key: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse configurations that have no invariant operations; `key` is the config key that asks for them."""
    problems = []
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        problems.append(Problem("on a GPU goes with train.dtype = bfloat16 or float16", key))
    if config.expert_capacity:
        problems.append(
            Problem("can't be had with model.expert_capacity, which drops tokens by who else is there", key)
        )
    if problems:
        raise UserError(*problems)


def by_row(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function to rows [batch, sequence, ...]. On a CPU it takes one row at a time, so that an element's offset in the
    vectorised loop depends on its row alone."""
    if tensors[0].is_cuda:
        return function(*tensors)
    rows = zip(*(x.flatten(0, 1).split(1) for x in tensors), strict=True)
    return torch.cat([function(*row) for row in rows]).unflatten(0, tensors[0].shape[:2])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Rows [rows, in] times a matrix [out, in]; in the dtype of the rows, unless `dtype` asks the GPU kernel for another."""
    if x.is_cuda:
        from shardwise.model.kernels.gemm.invariant import invariant_gemm

        return invariant_gemm(x, weight, bias, dtype=dtype)
    out = x.new_empty(len(x), weight.shape[0])
    for first in range(0, len(x), ROWS):
        block = x[first : first + ROWS]
        made = F.linear(F.pad(block, (0, 0, 0, ROWS - len(block))).contiguous(), weight, bias)
        out[first : first + ROWS] = made[: len(block)]
    return out


class InvariantGemm(Gemm):
    """A GEMM whose forward pass computes each row independently of the others; the backward pass is ordinary."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Linear.apply(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        cast = weight.to(x.dtype)
        return linear(x.flatten(0, -2), cast).unflatten(0, x.shape[:-1]), (x, cast)


GEMM = InvariantGemm()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (grad,), wanted = grads, ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            (rows @ weight).view_as(x) if wanted[0] else None,
            rows.mT @ x.flatten(0, -2) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )


def invariant_normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """A norm over the last dimension of [batch, sequence, ...]."""

    def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.is_cuda:
            from shardwise.model.kernels.gemm.invariant_rows import invariant_norm

            return invariant_norm(x, weight, bias, eps)
        return by_row(lambda row: normalize(row, weight, bias, eps), x)

    return with_ordinary_gradient(
        exact, partial(normalize, eps=eps), x, weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)
    )


def invariant_gated(function: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """`up` times a function of its gate."""

    def exact(gate: Tensor, up: Tensor) -> Tensor:
        if gate.is_cuda:
            from shardwise.model.kernels.gated import gated_product

            return gated_product(gate, up, "silu" if function is F.silu else "gelu")
        return by_row(partial(gated, function), gate, up) if gate.dim() > 2 else exact(gate[None], up[None])[0]

    return with_ordinary_gradient(exact, partial(gated, function), gate, up)


def invariant_by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """Heads [batch, sequence, heads, in], each times its own matrix [heads, in, out]."""

    def exact(x: Tensor, matrices: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if x.is_cuda:
            from shardwise.model.kernels.gemm.invariant import invariant_gemm_by_head

            made = invariant_gemm_by_head(rows, matrices.mT)
        else:
            made = torch.stack([linear(rows[:, n], matrix.mT) for n, matrix in enumerate(matrices)], dim=1)
        return made.unflatten(0, x.shape[:2])

    return with_ordinary_gradient(exact, multiply_by_head, x, matrices)


def invariant_router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Scores of all experts, in float32 or higher."""

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if x.is_cuda:
            # A float32 matrix as the sum of bfloat16 ones, whose products with bfloat16 tokens are exact. float16 tokens are
            # exactly the sum of two bfloat16 parts.
            tokens = in_parts(rows)[:2]
            parts = [linear(row, part, dtype=torch.float32) for part in in_parts(weight) for row in tokens]
            logits = in_order(parts)
        else:
            rows = at_least_float32(rows)
            logits = linear(rows, weight.to(rows.dtype))
        return logits.unflatten(0, x.shape[:2])

    return with_ordinary_gradient(exact, router_logits, x, weight)


def in_order(terms: list[Tensor]) -> Tensor:
    """A sum, one term after the other."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def invariant_total(x: Tensor) -> Tensor:
    """The sum over the last dimension, which is kept."""
    return in_order(list(x.split(1, dim=-1)))


def invariant_scores(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Softmax or sigmoid of a router's logits [batch, sequence, experts]."""
    return with_ordinary_gradient(partial(by_row, function), function, logits)


def invariant_combine(rows: Tensor, weights: Tensor) -> Tensor:
    """The sum of each token's expert outputs [tokens, k, width], weighted by [tokens, k]."""
    return in_order([rows[:, n] * weights[:, n, None].to(rows.dtype) for n in range(weights.shape[1])])


def invariant_grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, read: ReadCounts) -> Tensor:
    """Rows ordered by expert, times those experts' matrices."""

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            from shardwise.model.kernels.gemm.invariant import invariant_grouped_gemm

            return invariant_grouped_gemm(x, weight, counts)
        sizes = read(counts[None], len(x))[0]
        pairs = zip(x[: sum(sizes)].split(sizes), weight.unbind(), strict=True)
        return torch.cat([linear(rows, matrix) for rows, matrix in pairs])

    ordinary = partial(grouped_linear, counts=counts, read=read)
    return with_ordinary_gradient(exact, ordinary, x, weight.to(x.dtype))


def log_softmax(logits: Tensor) -> Tensor:
    """Logprobs of rows [rows, vocabulary], in float32 or higher; without a gradient."""
    if logits.is_cuda:
        from shardwise.model.kernels.gemm.invariant_rows import invariant_logsumexp

        return logits.float() - invariant_logsumexp(logits)[:, None]
    return by_row(lambda row: at_least_float32(row).log_softmax(dim=-1), logits[None])[0]


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logprob of one token of each row [rows, vocabulary]: the same bits that a server with `serve.invariant` returns."""

    def exact(logits: Tensor) -> Tensor:
        if logits.is_cuda:
            from shardwise.model.kernels.gemm.invariant_rows import invariant_logsumexp

            return logits.gather(1, tokens[:, None])[:, 0].float() - invariant_logsumexp(logits)
        return log_softmax(logits).gather(1, tokens[:, None])[:, 0]

    def ordinary(logits: Tensor) -> Tensor:
        return at_least_float32(logits).log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]

    return with_ordinary_gradient(exact, ordinary, logits)


class InvariantCrossEntropy(nn.Module):
    """The loss head of an invariant network: `LinearCrossEntropy` of `token_logprobs`. It holds all logits, with `make` too."""

    def forward(
        self, x: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor | None = None, make: Make | None = None
    ) -> Tensor:
        flat = targets.flatten()
        counted = flat != IGNORE_INDEX
        logprobs = token_logprobs(GEMM(x, matrix, None).flatten(0, 1), torch.where(counted, flat, 0))
        if make is not None:
            return make(torch.where(counted, logprobs, 0.0).view_as(targets))
        losses = torch.where(counted, -logprobs, 0.0)
        return (losses if weights is None else losses * weights.flatten()).sum()


def make_invariant(model: Transformer) -> None:
    """Replace a network's operations by ones whose results for a token do not depend on the batch."""
    model.invariant = True
    model.gemm, model.loss = GEMM, InvariantCrossEntropy()
    model.mask_builder = InvariantMaskBuilder(model.config.sliding_window)
    if model.config.position == "rotary":
        model.rope_builder = partial(rope_cos_sin, compute=by_row)
    for module in model.modules():
        if isinstance(module, Linear):
            module.gemm = GEMM
        elif isinstance(module, Norm):
            module.normalize = invariant_normalize
        elif isinstance(module, FeedForward):
            module.gated = invariant_gated
            module.function = partial(_activated, module.function) if module.gate is None else module.function
        elif isinstance(module, DotProductAttention):
            module.attend = attend_documents
        elif isinstance(module, LatentAttention):
            module.by_head, module.over_latents = invariant_by_head, True
        elif isinstance(module, Router):
            module.multiply, module.scores, module.total = invariant_router_logits, invariant_scores, invariant_total
        elif isinstance(module, Experts):
            module.multiply, module.gated = invariant_grouped_linear, invariant_gated
        elif isinstance(module, MoE):
            module.combine = invariant_combine


def _activated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return with_ordinary_gradient(partial(by_row, function), function, x)


def read_exactly(config: ModelConfig, name: str) -> bool:
    """Whether a 16-bit network uses a parameter before it is rounded to 16 bits: a server must then keep it as it was trained."""
    leaf = name.rsplit(".", 2)[-2:]
    return leaf == ["router", "weight"] or (
        config.position == "learned" and name in ("embed.weight", "positions.weight")
    )


def exactly_read(run: Run, device: torch.device) -> Callable[[str], bool] | None:
    """Which parameters a server of a run keeps as they were trained; None where it need not. Refuses unsupported
    configurations."""
    if not run.serve.invariant:
        return None
    check_invariant("serve.invariant", run.model, getattr(torch, run.train.dtype), device)
    return partial(read_exactly, run.model)
