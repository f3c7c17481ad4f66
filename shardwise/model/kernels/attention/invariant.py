"""Attention over pages on a GPU in which the bits of a token depend only on its sequence up to that token, however it is computed:
alone after a cached prompt, in a chunk, or in the middle of a whole training sequence.

A tile is always 64 rows, tokens times the heads that share a key, and 64 keys, counted from the sequence's beginning. So the
tensor cores do the same for a row whatever the other rows are. Keys are folded into the result in parts of `PART` keys, in order.
Where there are too few tokens to keep a GPU busy, parts become programs of their own, and a second kernel folds their partial
results in the same order; where there are enough, one program computes one part after the other. Keys that a row does not see
change nothing: adding zero is exact, and so is multiplying by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.attention.decode import INDICES, LOG2E

PART = 256
"""Keys that are folded into the result at once."""
PROGRAMS = 132 * 2
"""With fewer programs, parts become programs of their own."""


@triton.jit
def _folded(whole, whole_total, whole_highest, out, total, highest):  # type: ignore[no-untyped-def]
    """Merge the result so far with that of a further part: outputs without their divisor, divisors, and the largest scores."""
    higher = tl.maximum(whole_highest, highest)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(whole_highest - safe), tl.exp2(highest - safe)
    return whole * old[:, None] + out * new[:, None], whole_total * old + total * new, higher


@triton.jit(do_not_specialize=["tokens", "pages"], do_not_specialize_on_alignment=[*INDICES, "CU_SEQLENS", "TILES"])
def _attend(  # type: ignore[no-untyped-def]
    Q, K, V, TABLE, SLOTS, STARTS, CU_SEQLENS, TILES, OUT, FOUND, TOTAL, HIGHEST, q0, q1, k0, k1, k2, v0, v1, v2, pages, tokens,
    scale, GROUP: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, APART: tl.constexpr, PART: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """A tile of new tokens of one sequence, for G heads that share one key head; with APART, one part of their keys."""
    BLOCKS: tl.constexpr = (GROUP + G - 1) // G
    tile, kv, member = tl.program_id(0), tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS * G
    sequence, first = tl.load(TILES + 2 * tile), tl.load(TILES + 2 * tile + 1)
    begin, stop = tl.load(CU_SEQLENS + sequence), tl.load(CU_SEQLENS + sequence + 1)
    if begin + first >= stop:
        return
    start, slot = tl.load(STARTS + sequence), tl.load(SLOTS + sequence).to(tl.int64)
    ROWS: tl.constexpr = M // G
    r, d, dv = tl.arange(0, M), tl.arange(0, D), tl.arange(0, DV)
    m, member = first + r // G, member + r % G
    head = kv * GROUP + member
    token, position = (begin + m).to(tl.int64), start + m
    here = (r < ROWS * G) & (member < GROUP) & (token < stop)
    end = start + tl.minimum(first + ROWS, stop - begin)
    low = tl.maximum(start + first + 1 - WINDOW, 0) // N * N if WINDOW else 0
    if APART:
        low = tl.maximum(low, tl.program_id(2) * PART)
        end = tl.minimum(end, tl.program_id(2) * PART + PART)
        if low >= end:
            return
    q = tl.load(
        Q + token[:, None] * q0 + head[:, None] * q1 + d[None, :], mask=here[:, None] & (d < WIDTH)[None, :], other=0.0
    )
    whole, out = tl.zeros((M, DV), tl.float32), tl.zeros((M, DV), tl.float32)
    whole_total, total = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    whole_highest = tl.full((M,), float("-inf"), tl.float32)
    highest = tl.full((M,), float("-inf"), tl.float32)
    for at in range(low, end, N):
        if not APART and at % PART == 0:
            whole, whole_total, whole_highest = _folded(whole, whole_total, whole_highest, out, total, highest)
            out, total = tl.zeros((M, DV), tl.float32), tl.zeros((M,), tl.float32)
            highest = tl.full((M,), float("-inf"), tl.float32)
        n = at + tl.arange(0, N)
        page = tl.load(TABLE + slot * pages + n // PAGE, mask=n < end, other=0).to(tl.int64)
        if WINDOW:
            page = tl.maximum(page, 0)  # the page may be freed
        k = tl.load(
            K + page[None, :] * k0 + kv * k1 + (n % PAGE)[None, :] * k2 + d[:, None],
            mask=(d < WIDTH)[:, None],
            other=0.0,
        )
        there = n < end
        if WINDOW:
            there = there & (n > start + first - WINDOW)
        v = tl.load(
            V + page[:, None] * v0 + kv * v1 + (n % PAGE)[:, None] * v2 + dv[None, :],
            mask=there[:, None] & (dv < V_WIDTH)[None, :],  # values that no query sees may be NaN
            other=0.0,
        )
        s = tl.dot(q, k, input_precision="ieee") * scale
        seen = n[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (position[:, None] - n[None, :] < WINDOW)
        s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        highest = higher
    if APART:
        place = (tl.program_id(2).to(tl.int64) * tokens + token) * HEADS + head
        tl.store(FOUND + place[:, None] * V_WIDTH + dv[None, :], out, mask=here[:, None] & (dv < V_WIDTH)[None, :])
        tl.store(TOTAL + place, total, mask=here)
        tl.store(HIGHEST + place, highest, mask=here)
    else:
        whole, whole_total, whole_highest = _folded(whole, whole_total, whole_highest, out, total, highest)
        whole = whole / whole_total[:, None]
        tl.store(
            OUT + (token[:, None] * HEADS + head[:, None]) * V_WIDTH + dv[None, :],
            whole.to(OUT.dtype.element_ty),
            mask=here[:, None] & (dv < V_WIDTH)[None, :],
        )


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["POSITIONS"])
def _fold(  # type: ignore[no-untyped-def]
    FOUND, TOTAL, HIGHEST, POSITIONS, OUT, tokens, HEADS: tl.constexpr, H: tl.constexpr, V_WIDTH: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Fold the parts of one token, in order."""
    token = tl.program_id(0).to(tl.int64)
    head, dv = tl.program_id(1) * H + tl.arange(0, H), tl.arange(0, DV)
    here = (head < HEADS)[:, None] & (dv < V_WIDTH)[None, :]
    position = tl.load(POSITIONS + token)
    low = tl.maximum(position + 1 - WINDOW, 0) // PART if WINDOW else 0
    whole, whole_total = tl.zeros((H, DV), tl.float32), tl.zeros((H,), tl.float32)
    whole_highest = tl.full((H,), float("-inf"), tl.float32)
    for part in range(low, position // PART + 1):
        place = (part * tokens + token) * HEADS + head
        out = tl.load(FOUND + place[:, None] * V_WIDTH + dv[None, :], mask=here, other=0.0)
        total = tl.load(TOTAL + place, mask=head < HEADS, other=1.0)
        highest = tl.load(HIGHEST + place, mask=head < HEADS, other=0.0)
        whole, whole_total, whole_highest = _folded(whole, whole_total, whole_highest, out, total, highest)
    whole = whole / whole_total[:, None]
    into = OUT + (token * HEADS + head[:, None]) * V_WIDTH + dv[None, :]
    tl.store(into, whole.to(OUT.dtype.element_ty), mask=here)


class Tile(NamedTuple):
    """The tile that a program computes at once, and how."""

    m: int
    """Tokens times heads."""
    n: int
    """Keys."""
    warps: int
    stages: int


def tile_of(width: int) -> Tile:
    """The tile for keys of this width: it fits a program's memory, and has for usual widths the 64 rows that `wgmma` needs."""
    if width <= 128:
        return Tile(64, 64, 4, 3)
    return Tile(64, 64, 4, 2) if width <= 256 else Tile(16, 32, 8, 2)


def tokens_of_tile(heads: int, kv_heads: int, width: int) -> int:
    """Tokens in a tile."""
    rows = tile_of(width).m
    return rows // min(rows, heads // kv_heads)


def invariant_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, tiles: Tensor,
    positions: Tensor, longest: int, scale: float, window: int = 0,
) -> Tensor:  # fmt: skip
    """Attention of new tokens [tokens, heads, width], whose keys and values are in their pages; returns [tokens, heads, value
    width]. `tiles` are pairs of a sequence and the first new token of a tile; no sequence has more than `longest` tokens."""
    (tokens, heads, width), (_, kv_heads, page, v_width) = q.shape, values.shape
    group, wide, v_wide = heads // kv_heads, triton.next_power_of_2(width), triton.next_power_of_2(v_width)
    tile = tile_of(width)
    together = min(tile.m, group)
    parts, programs = triton.cdiv(longest, PART), kv_heads * triton.cdiv(group, together)
    apart = parts > 1 and tokens * programs <= PROGRAMS
    out = q.new_empty(tokens, heads, v_width)
    found, total, highest = out, out, out
    if apart:
        found = torch.empty(parts, tokens, heads, v_width, dtype=torch.float32, device=q.device)
        total, highest = torch.empty(2, parts, tokens, heads, dtype=torch.float32, device=q.device)
    _attend[len(tiles) // 2, programs, parts if apart else 1](
        q, keys, values, table, slots, starts, cu_seqlens, tiles, out, found, total, highest, q.stride(0), q.stride(1),
        *keys.stride()[:3], *values.stride()[:3], table.stride(0), tokens, scale * LOG2E, GROUP=group, G=together, HEADS=heads,
        WIDTH=width, V_WIDTH=v_width, D=wide, DV=v_wide, PAGE=page, WINDOW=window, APART=apart, PART=PART, M=tile.m,
        N=tile.n, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if apart:
        block = min(4, triton.next_power_of_2(heads))
        _fold[tokens, triton.cdiv(heads, block)](
            found, total, highest, positions, out, tokens, HEADS=heads, H=block, V_WIDTH=v_width, DV=v_wide, WINDOW=window,
            PART=PART, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
