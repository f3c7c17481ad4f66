"""Attention to blocks of a split sequence by fused kernels: as exact as one device's, and nearly as fast as the kernel alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.parallel.blockwise import KERNELS, Blockwise, attend_block, merge, row_bounds
from shardwise.parallel.context import ContextMask, gather_parts, ring_part, zigzag_positions

sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCALE = 0.088
DEVICE = torch.device("cuda", 0)


def ring(rank: int, ranks: int, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
    """What a rank of ring attention gives, the keys of all ranks being here."""
    length = q.shape[1]
    places = [torch.from_numpy(zigzag_positions(length, ranks, r)).cuda() for r in range(ranks)]
    queries = q[:, places[rank]].transpose(1, 2)
    out = lse = torch.empty(0)
    for step in range(ranks):
        owner = (rank - step) % ranks
        mine, theirs, seen = ring_part(rank, owner, ranks, length // ranks, mask, DEVICE)
        keys, values = (x[:, places[owner]][:, theirs].transpose(1, 2) for x in (k, v))
        block = attend_block(queries[:, :, mine], keys, values, SCALE, seen)
        if step:
            merge(out[:, :, mine], lse[:, :, mine], *block)
        else:
            out, lse = block[0].float(), block[1]
    return out.to(q.dtype).transpose(1, 2)


def gather(rank: int, ranks: int, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
    """What a rank of gather attention gives."""
    mine = torch.from_numpy(zigzag_positions(q.shape[1], ranks, rank)).cuda()
    parts = gather_parts(rank, ranks, q.shape[1] // ranks, mask, DEVICE)
    return Blockwise.apply(q[:, mine], k, v, lambda: parts, SCALE, KERNELS)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2)


@pytest.mark.parametrize("attend", [ring, gather])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_bfloat16_it_errs_as_one_device_does(attend: object, ranks: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2048, n, 128, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
    expected = exact(q, k, v)
    one = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=SCALE, enable_gqa=True
    ).transpose(1, 2)
    usual = (one - expected).square().mean().sqrt()
    order = [place for rank in range(ranks) for place in zigzag_positions(2048, ranks, rank)]
    mine = torch.cat([attend(rank, ranks, q, k, v, ContextMask(None, 0)) for rank in range(ranks)], dim=1)  # type: ignore[operator]
    error = (mine - expected[:, order]).square().mean().sqrt()
    print(f"{attend.__name__} {ranks}: {error / usual:.4f} of one device's error")  # type: ignore[attr-defined]
    assert error <= 1.1 * usual


def test_gradients_are_those_of_one_device() -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(1, 1024, n, 128, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2)]
    grad = torch.randn(1, 1024, 8, 128, device="cuda", dtype=torch.bfloat16)
    one, parts, low = ([x.clone().requires_grad_() for x in inputs] for _ in range(3))
    low = [x.double().detach().requires_grad_() for x in inputs]
    exact(*low).backward(grad.double())
    F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in one), is_causal=True, scale=SCALE, enable_gqa=True
    ).transpose(1, 2).backward(grad)
    for rank in range(4):
        gather(rank, 4, *parts, ContextMask(None, 0)).backward(grad[:, zigzag_positions(1024, 4, rank)])
    for mine, theirs, truth in zip(parts, one, low, strict=True):
        usual = (theirs.grad - truth.grad).square().mean().sqrt()
        assert (mine.grad - truth.grad).square().mean().sqrt() <= 2 * usual


def test_documents_and_windows_are_bounds() -> None:
    from bounded_attention_check import check

    check(
        [(2, 4, 2, 200, 333, 64, 64), (1, 8, 8, 128, 512, 128, 128), (1, 4, 4, 96, 160, 192, 128)],
        torch.bfloat16,
        "cuda",
        2e-2,
    )
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 512, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    found = (torch.rand(2, 512, device="cuda") < 0.02).cumsum(1)
    low = row_bounds(found, 100, 512, DEVICE)
    order = [place for rank in range(4) for place in zigzag_positions(512, 4, rank)]
    results = [
        torch.cat([attend(rank, 4, *x, ContextMask(found, 100, low)) for rank in range(4)], dim=1)
        for attend in (ring, gather)
        for x in ((q, k, v),)
    ]
    place = torch.arange(512, device="cuda")
    seen = (
        (place <= place[:, None])
        & (place[:, None] - place < 100)
        & (found[:, None, :, None] == found[:, None, None, :])
    )
    heads = [x.double().transpose(1, 2) for x in (q, k, v)]
    heads = [heads[0], *(x.repeat_interleave(2, dim=1) for x in heads[1:])]
    expected = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=SCALE).transpose(1, 2)[:, order]
    for mine in results:
        torch.testing.assert_close(mine.double(), expected, rtol=2e-2, atol=2e-2)
