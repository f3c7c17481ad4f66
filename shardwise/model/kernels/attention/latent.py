"""Attention of one new token of each of many sequences to the pages of their latents (DeepSeek-V2, section 2.1.2). A latent is the
key and, without the rotary part at its end, also the value: a program loads it once for both, and for all of its heads.

As in `decode.py`, the latents of a sequence are split over several programs where there are few sequences, and the last program to
finish merges their partial results. The new latents are already in their pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.attention.decode import ALONE, INDICES, LOG2E, Scratch


@dataclass(frozen=True)
class Tile:
    """Heads and latents that a program takes at a time, its warps, and its pipeline stages."""

    heads: int
    latents: int
    warps: int
    stages: int


TILES = {16: Tile(16, 32, 4, 2), 32: Tile(32, 32, 4, 2)}
"""By the heads of a program: more heads share each load, as long as their sums fit in registers. Those of 64 heads do not: four
times as slow (`benchmarks/gpu/RESULTS.md`)."""


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _attend(  # type: ignore[no-untyped-def]
    Q, K, TABLE, SLOTS, STARTS, OUT, PART, HIGHEST, TOTAL, ARRIVED, kv_scale, q0, q1, pages, scale,
    HEADS: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, FP8: tl.constexpr, N: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    split, block, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(SLOTS + sequence).to(tl.int64)
    stop = tl.load(STARTS + sequence) + 1
    low = tl.maximum(stop - WINDOW, 0) if WINDOW else 0
    first_tile = low // N
    tiles = tl.cdiv(stop, N) - first_tile
    share = tl.cdiv(tiles, SPLITS)
    if tiles <= ALONE:
        share = ALONE
    active = tl.cdiv(tiles, share)
    if split >= active:
        return
    WIDTH: tl.constexpr = RANK + ROPE
    dtype = Q.dtype.element_ty
    h, r, p = block * H + tl.arange(0, H), tl.arange(0, R), tl.arange(0, P)
    real = h < HEADS
    query = Q + sequence.to(tl.int64) * q0 + h[:, None] * q1
    q = tl.load(query + r[None, :], mask=real[:, None] & (r < RANK)[None, :], other=0.0)
    turned = tl.load(query + RANK + p[None, :], mask=real[:, None] & (p < ROPE)[None, :], other=0.0)
    highest = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    out = tl.zeros((H, R), tl.float32)
    begin = (first_tile + split * share) * N
    end = tl.minimum(begin + share * N, stop)
    for first in range(begin, end, N):
        n = first + tl.arange(0, N)
        seen = n < end
        if WINDOW:
            seen = seen & (n >= low)
        page = tl.load(TABLE + slot * pages + n // PAGE, mask=seen, other=0).to(tl.int64)
        place = (page * PAGE + n % PAGE) * WIDTH
        # Latents that are not seen may hold anything, even NaN, and zero times NaN is not zero.
        latent = tl.load(K + place[:, None] + r[None, :], mask=seen[:, None] & (r < RANK)[None, :], other=0.0)
        key = tl.load(K + place[None, :] + RANK + p[:, None], mask=seen[None, :] & (p < ROPE)[:, None], other=0.0)
        if FP8:
            latent, key = latent.to(dtype), key.to(dtype)
        s = tl.dot(q, tl.trans(latent), input_precision="ieee")
        s = tl.dot(turned, key, s, input_precision="ieee") * (scale * kv_scale if FP8 else scale)
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(weights, 1)
        if FP8:
            weights = weights * kv_scale
        out = tl.dot(weights.to(dtype), latent, out * shrink[:, None], input_precision="ieee")
        highest = higher
    into = OUT + (sequence.to(tl.int64) * HEADS + h)[:, None] * RANK + r[None, :]
    if active == 1:
        tl.store(into, (out / total[:, None]).to(OUT.dtype.element_ty), mask=real[:, None] & (r < RANK)[None, :])
        return
    group = sequence * tl.num_programs(1) + block
    mine = (group.to(tl.int64) * SPLITS + split) * H + tl.arange(0, H)
    tl.store(PART + mine[:, None] * R + r[None, :], out)
    tl.store(HIGHEST + mine, highest)
    tl.store(TOTAL + mine, total)
    tl.debug_barrier()
    if tl.atomic_add(ARRIVED + group, 1, sem="acq_rel") == active - 1:
        tl.store(ARRIVED + group, 0)
        parts = tl.arange(0, SPLITS)
        there = parts < active
        for one in range(tl.minimum(H, HEADS - block * H)):
            its = (group.to(tl.int64) * SPLITS + parts) * H + one
            high = tl.load(HIGHEST + its, mask=there, other=float("-inf"), cache_modifier=".cg")
            weight = tl.exp2(high - tl.max(high, 0))
            sums = tl.load(TOTAL + its, mask=there, other=0.0, cache_modifier=".cg") * weight
            part = tl.load(PART + its[:, None] * R + r[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
            merged = tl.sum(part * weight[:, None], 0) / tl.sum(sums, 0)
            where = OUT + (sequence.to(tl.int64) * HEADS + block * H + one) * RANK + r
            tl.store(where, merged.to(OUT.dtype.element_ty), mask=r < RANK)


def tile_of(heads: int) -> Tile:
    """The tile for this many heads."""
    return TILES[max(16, min(32, triton.next_power_of_2(heads)))]


def latent_scratch(sequences: int, heads: int, rank: int, device: torch.device, tile: Tile | None = None) -> Scratch:
    """Scratch memory for the programs' partial results, for this many sequences."""
    rows = (tile or tile_of(heads)).heads
    blocks = triton.cdiv(heads, rows)
    return Scratch(sequences, blocks * rows, blocks, max(16, triton.next_power_of_2(rank)), device)


def latent_attention(
    q: Tensor, keys: Tensor, rank: int, table: Tensor, slots: Tensor, starts: Tensor, scratch: Scratch, scale: float,
    window: int = 0, kv_scale: float = 1.0, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Queries [sequences, heads, rank + rotary width] of new tokens to pages of latents [pages, 1, tokens, rank + rotary width];
    returns [sequences, heads, rank]."""
    sequences, heads, width = q.shape
    tile = tile or tile_of(heads)
    splits, rope = scratch.splits(sequences), width - rank
    out = q.new_empty(sequences, heads, rank)
    _attend[splits, triton.cdiv(heads, tile.heads), sequences](
        q, keys, table, slots, starts, out, scratch.part, scratch.highest, scratch.total, scratch.arrived, kv_scale, q.stride(0),
        q.stride(1), table.stride(0), scale * LOG2E, HEADS=heads, H=tile.heads, RANK=rank, ROPE=rope,
        R=max(16, triton.next_power_of_2(rank)), P=max(16, triton.next_power_of_2(rope)), PAGE=keys.shape[2], SPLITS=splits,
        WINDOW=window, FP8=keys.dtype == torch.float8_e4m3fn, N=tile.latents, ALONE=ALONE // tile.latents,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
