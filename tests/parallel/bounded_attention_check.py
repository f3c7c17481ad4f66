"""Holds the kernel of bounded attention to plain arithmetic in float64: a script for Triton's interpreter, a function for GPUs."""

from __future__ import annotations

import torch

from shardwise.model.kernels.attention.bounded import (
    bounded_attention,
    bounded_attention_backward,
    whole_attention,
)
from shardwise.model.kernels.attention.row_sums import row_sums_of_products
from shardwise.parallel.blockwise import CAUSAL, Bounds, attend_block, attend_block_backward

SCALE = 0.3
SHAPES = [(2, 4, 2, 40, 70, 24, 16), (1, 2, 2, 33, 130, 64, 64), (1, 2, 1, 35, 70, 48, 32)]


def check(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Random places, bounds and heads of these shapes: batch, heads, key/value heads, queries, keys, width, width of values."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for batch, many, few, queries, keys, width, v_width in shapes:
        q, k, v = (
            normal(batch, queries, many, width).transpose(1, 2),
            *(normal(batch, few, keys, n) for n in (width, v_width)),
        )
        length = 2 * max(queries, keys)
        place, key_place = (
            torch.randperm(length, generator=generator)[:n].sort().values.int() for n in (queries, keys)
        )
        low = (place - torch.randint(0, length // 2, (batch, queries), generator=generator)).clamp(min=0).int()
        low = low.cummax(dim=1).values  # as those of documents and windows do
        bounds = Bounds(*(x.to(device) for x in (low, place, key_place)), 0.0)
        out, lse = bounded_attention(q, k, v, SCALE, *bounds[:3])
        expected, sums = attend_block(q.double(), k.double(), v.double(), SCALE, bounds)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), sums, rtol=tolerance, atol=tolerance)
        for mask in (None, CAUSAL):
            few_keys = k[:, :, : k.shape[2] if mask is None else queries]
            few_values = v[:, :, : few_keys.shape[2]]
            some = q[:, :, : few_keys.shape[2]] if mask is CAUSAL else q
            both = whole_attention(some, few_keys, few_values, SCALE, mask is CAUSAL)
            wanted = attend_block(some.double(), few_keys.double(), few_values.double(), SCALE, mask)
            for mine, theirs in zip(both, wanted, strict=True):
                torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
        grad = normal(*out.shape)
        delta = (grad.float() * out).sum(-1)
        by_sequence = out.transpose(1, 2).contiguous().transpose(1, 2)
        torch.testing.assert_close(row_sums_of_products(grad, by_sequence), delta, rtol=1e-4, atol=1e-4)
        found = bounded_attention_backward(grad, delta, q, k, v, lse, SCALE, *bounds[:3])
        wanted = attend_block_backward(*(x.double() for x in (grad, out, delta, q, k, v, lse)), SCALE, bounds)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=10 * tolerance, atol=10 * tolerance)


if __name__ == "__main__":
    check(SHAPES, torch.float32, "cpu", 1e-5)
