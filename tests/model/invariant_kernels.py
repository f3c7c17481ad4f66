"""What `test_invariant.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: the invariant kernels
against plain PyTorch. That their bits do not depend on the batch only a GPU can show (`tests/cuda/`)."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.kernels.attention import invariant as kernel
from shardwise.model.kernels.attention.paged import tiles_of
from shardwise.model.kernels.gemm.invariant import invariant_gemm, invariant_gemm_by_head, invariant_grouped_gemm
from shardwise.model.kernels.gemm.invariant_rows import invariant_logsumexp, invariant_norm
from shardwise.model.paged import PagedBatch, paged_attention_reference


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def gemms() -> None:
    for rows, n, k in ((1, 70, 100), (5, 64, 128), (40, 130, 130)):
        x, weight, bias, residual = torch.randn(rows, k), torch.randn(n, k), torch.randn(n), torch.randn(rows, n)
        close(invariant_gemm(x, weight, bias), F.linear(x, weight, bias))
        close(invariant_gemm(x, weight, None, residual.clone()), residual + F.linear(x, weight))
    x = torch.randn(7, 3, 20)
    for weight in (torch.randn(3, 12, 20), torch.randn(3, 20, 12).mT):
        close(invariant_gemm_by_head(x, weight), torch.einsum("thi,hoi->tho", x, weight))
    counts, x, weight = torch.tensor([3, 0, 18, 1]), torch.randn(24, 20), torch.randn(4, 12, 20)
    found, first = invariant_grouped_gemm(x, weight, counts), 0
    for expert, count in enumerate(counts.tolist()):
        close(found[first : first + count], F.linear(x[first : first + count], weight[expert]))
        first += count


def rows() -> None:
    x, weight, bias = torch.randn(5, 100) * 3, torch.rand(100), torch.rand(100)
    close(invariant_norm(x, weight, None, 1e-5), F.rms_norm(x, (100,), weight, 1e-5))
    close(invariant_norm(x, weight, bias, 1e-5), F.layer_norm(x, (100,), weight, bias, 1e-5))
    close(invariant_logsumexp(x), x.logsumexp(-1))


def attention(
    heads: int, kv_heads: int, width: int, page: int, window: int, starts: list[int], counts: list[int], programs: int
) -> None:
    """With so few programs that parts of the keys become programs of their own, or so many that they do not."""
    kernel.PROGRAMS = programs
    pages, sequences, decodes = 100, len(starts), sum(count == 1 for count in counts)
    keys, values = torch.randn(2, pages, kv_heads, page, width).unbind()
    free, slots = iter((torch.randperm(pages - 1) + 1).tolist()), torch.randperm(sequences).int() + 1
    table = torch.zeros(sequences + 1, 64, dtype=torch.int32)
    for slot, start, count in zip(slots.tolist(), starts, counts, strict=True):
        for n in range(-(-(start + count) // page)):
            table[slot, n] = -1 if window and (n + 1) * page <= start + 1 - window else next(free)
    bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).int()
    old, longest = torch.tensor(starts, dtype=torch.int32), max(map(sum, zip(starts, counts, strict=True)))
    batch = PagedBatch(table, slots, old, bounds, decodes, tuple(counts[decodes:]), longest, positions)
    q = torch.randn(sum(counts), heads, width)
    tiles = torch.tensor(tiles_of(tuple(counts), kernel.tokens_of_tile(heads, kv_heads, width)), dtype=torch.int32)
    where = (table, slots, old, bounds, tiles, positions)
    found = kernel.invariant_attention(q, keys, values, *where, longest, width**-0.5, window)
    close(found, paged_attention_reference(q, keys, values, batch, width**-0.5, window))


if __name__ == "__main__":
    torch.manual_seed(0)
    gemms()
    rows()
    for programs in (0, 10**6):
        attention(8, 2, 32, 16, 0, [5, 0, 300], [1, 10, 3], programs)
        attention(6, 2, 32, 16, 40, [5, 0, 290], [1, 23, 20], programs)
        attention(80, 1, 32, 16, 0, [5, 0], [1, 3], programs)
