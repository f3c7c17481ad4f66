"""Attention to blocks of a split sequence is attention to the whole of it, in every precision and for every mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_kernels import Interpreter
from torch import Tensor

from shardwise.parallel.blockwise import KERNELS, Blockwise, attend_block, joined, merge, row_bounds
from shardwise.parallel.context import (
    ContextMask,
    by_position,
    by_rank,
    gather_parts,
    ring_part,
    zigzag_order,
    zigzag_positions,
)

RANKS, LENGTH, SCALE = 4, 64, 0.3
KERNEL = Path(__file__).with_name("bounded_attention_check.py")


def heads(dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two, [batch, sequence, heads, width]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, LENGTH, 4, 16), (2, LENGTH, 2, 16), (2, LENGTH, 2, 8))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def documents(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(2, LENGTH, generator=generator) < 0.08).cumsum(1)


def whole(q: Tensor, k: Tensor, v: Tensor, found: Tensor | None, window: int) -> Tensor:
    """Attention on one device by a dense mask."""
    place = torch.arange(LENGTH, device=q.device)
    seen = place <= place[:, None]
    if window:
        seen = seen & (place[:, None] - place < window)
    seen = seen[None, None]
    if found is not None:
        seen = seen & (found[:, None, :, None] == found[:, None, None, :])
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=SCALE).transpose(1, 2)


def gathered(rank: int, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
    """What a rank of gather attention gives."""
    mine = torch.from_numpy(zigzag_positions(LENGTH, RANKS, rank)).to(q.device)
    parts = gather_parts(rank, RANKS, LENGTH // RANKS, mask, q.device)
    return Blockwise.apply(q[:, mine], k, v, lambda: parts, SCALE, KERNELS)


def round_the_ring(rank: int, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
    """What a rank of ring attention gives, the keys of all ranks being here."""
    places = [torch.from_numpy(zigzag_positions(LENGTH, RANKS, r)).to(q.device) for r in range(RANKS)]
    queries = q[:, places[rank]].transpose(1, 2)
    out = lse = torch.empty(0)
    for step in range(RANKS):
        owner = (rank - step) % RANKS
        mine, theirs, seen = ring_part(rank, owner, RANKS, LENGTH // RANKS, mask, q.device)
        keys, values = (x[:, places[owner]][:, theirs].transpose(1, 2) for x in (k, v))
        block = attend_block(queries[:, :, mine], keys, values, SCALE, seen)
        if step:
            merge(out[:, :, mine], lse[:, :, mine], *block)
        else:
            out, lse = block[0].to(torch.promote_types(q.dtype, torch.float32)), block[1]
    return out.to(q.dtype).transpose(1, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_chunks_are_moved_as_the_zigzag_has_them(ranks: int) -> None:
    whole = torch.randn(2, 4 * ranks, 3, requires_grad=True)
    shards = by_rank(whole, ranks)
    assert torch.equal(shards, whole[:, zigzag_order(4 * ranks, ranks)])
    assert torch.equal(by_position(shards, ranks), whole)
    weights = torch.randn(2, 4 * ranks, 3)
    (gradient,) = torch.autograd.grad((by_position(by_rank(whole, ranks) * 2, ranks) * weights).sum(), whole)
    assert torch.equal(gradient, 2 * weights)


@pytest.mark.parametrize("window", [0, 1, 7, 40, 64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attend", [gathered, round_the_ring])
def test_blocks_are_the_whole(attend: object, packed: bool, window: int) -> None:
    q, k, v = heads(torch.float64)
    found = documents() if packed else None
    mask = ContextMask(found, window, row_bounds(found, window, LENGTH, q.device))
    expected = whole(q, k, v, found, window)
    for rank in range(RANKS):
        mine = zigzag_positions(LENGTH, RANKS, rank)
        torch.testing.assert_close(attend(rank, q, k, v, mask), expected[:, mine], rtol=0, atol=1e-12)  # type: ignore[operator]


@pytest.mark.parametrize("window", [0, 16, 40])
@pytest.mark.parametrize("attend", [gathered, round_the_ring])
def test_documents_of_one_row_are_seen_inside_of_a_window(attend: object, window: int) -> None:
    q, k, v = (x[:1] for x in heads(torch.float64))
    found = documents()[:1]
    mask = ContextMask(found, window, row_bounds(found, window, LENGTH, q.device))
    expected = whole(q, k, v, found, window)
    for rank in range(RANKS):
        mine = zigzag_positions(LENGTH, RANKS, rank)
        torch.testing.assert_close(attend(rank, q, k, v, mask), expected[:, mine], rtol=0, atol=1e-12)  # type: ignore[operator]


@pytest.mark.parametrize(("packed", "window"), [(False, 0), (True, 0), (True, 9)])
def test_their_gradients_are_those_of_the_whole(packed: bool, window: int) -> None:
    inputs = heads(torch.float64)
    found = documents() if packed else None
    mask = ContextMask(found, window, row_bounds(found, window, LENGTH, inputs[0].device))
    one, parts = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    grad = torch.randn(2, LENGTH, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole(*one, found, window).backward(grad)
    for rank in range(RANKS):
        gathered(rank, *parts, mask).backward(grad[:, zigzag_positions(LENGTH, RANKS, rank)])
    for mine, theirs in zip(parts, one, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_gradients_of_slices_are_added_up_and_rounded_once(ends: list[tuple[int, int]]) -> None:
    like = torch.empty(2, 9, 3, 4, dtype=torch.bfloat16)
    torch.manual_seed(4)
    places = [slice(min(pair), max(pair)) for pair in ends]
    pieces = [(place, torch.randn(2, 3, place.stop - place.start, 4).bfloat16()) for place in places]
    want = torch.zeros(2, 3, 9, 4)
    for place, piece in pieces:
        want[:, :, place] += piece
    got = joined(like, pieces)
    assert got.is_contiguous()
    assert torch.equal(got, want.bfloat16().transpose(1, 2))


@pytest.mark.parametrize("attend", [gathered, round_the_ring])
def test_in_bfloat16_they_err_as_one_device_does(attend: object) -> None:
    q, k, v = heads(torch.bfloat16)
    mask = ContextMask(None, 0)
    exact = whole(q.double(), k.double(), v.double(), None, 0)
    usual = (whole(q, k, v, None, 0) - exact).square().mean().sqrt()
    mine = torch.cat([attend(rank, q, k, v, mask) for rank in range(RANKS)], dim=1)  # type: ignore[operator]
    order = [place for rank in range(RANKS) for place in zigzag_positions(LENGTH, RANKS, rank)]
    assert (mine - exact[:, order]).square().mean().sqrt() <= 1.1 * usual


@pytest.mark.drawn(group="kernels")
def test_the_kernel_does_what_plain_arithmetic_does(interpreter: Interpreter) -> None:
    """tests/cuda has it on a GPU."""
    interpreter.run(KERNEL)
