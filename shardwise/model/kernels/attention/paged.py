"""Prefill over pages, as two kernels: one rotates queries and keys in place and writes keys and values to their pages, the other
attends from any number of new tokens of any sequence to all its tokens, old ones included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.attention.decode import INDICES, LOG2E, _rotated
from shardwise.model.kernels.attention.tiles import PromptTile

ROTATED = 16
"""New tokens of one head that a program rotates."""


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["PLACES", "POSITIONS"])
def _rope_write(  # type: ignore[no-untyped-def]
    QKV, COS, SIN, Q_NORM, K_NORM, K, V, PLACES, POSITIONS, tokens, row, eps, kv_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROPE: tl.constexpr, QK_NORM: tl.constexpr, FP8: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(0)
    here = (token < tokens)[:, None]
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, HALF)[None, :]
    dtype = QKV.dtype.element_ty
    at = QKV + token.to(tl.int64)[:, None] * row + head * D + half
    x1 = tl.load(at, mask=here, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if QK_NORM:
            norm = Q_NORM if head < HEADS else K_NORM
            rms = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
            x1 = (x1 * rms * tl.load(norm + half)).to(dtype).to(tl.float32)
            x2 = (x2 * rms * tl.load(norm + HALF + half)).to(dtype).to(tl.float32)
        if ROPE:
            position = tl.load(POSITIONS + token, mask=token < tokens, other=0)[:, None]
            cos, sin = tl.load(COS + position * HALF + half), tl.load(SIN + position * HALF + half)
            r1, r2 = _rotated(x1, x2, cos, sin, dtype)
            x1, x2 = r1.to(tl.float32), r2.to(tl.float32)
        tl.store(at, x1.to(dtype), mask=here)
        tl.store(at + HALF, x2.to(dtype), mask=here)
    if head >= HEADS:
        place = tl.load(PLACES + token, mask=token < tokens, other=0)[:, None]
        kv = (head - HEADS) % KV_HEADS
        where = ((place // PAGE * KV_HEADS + kv) * PAGE + place % PAGE) * D + half
        into = K if head < HEADS + KV_HEADS else V
        if FP8:
            x1, x2 = x1 / kv_scale, x2 / kv_scale
        tl.store(into + where, x1.to(K.dtype.element_ty), mask=here)
        tl.store(into + where + HALF, x2.to(K.dtype.element_ty), mask=here)


def rope_write(
    qkv: Tensor, rope: tuple[Tensor, Tensor] | None, norms: tuple[Tensor, Tensor, float] | None, keys: Tensor, values: Tensor,
    places: Tensor, positions: Tensor, heads: int, kv_scale: float = 1.0,
) -> None:  # fmt: skip
    """Rotate queries and keys of new tokens [tokens, all heads x width] in place, and write keys and values to their pages."""
    _, kv_heads, page, width = keys.shape
    cos, sin = rope if rope is not None else (qkv, qkv)
    q_norm, k_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    _rope_write[heads + 2 * kv_heads, triton.cdiv(len(qkv), ROTATED)](
        qkv, cos, sin, q_norm, k_norm, keys, values, places, positions, len(qkv), qkv.stride(0), eps, kv_scale,
        HEADS=heads, KV_HEADS=kv_heads, D=width, PAGE=page, ROPE=rope is not None, QK_NORM=norms is not None,
        FP8=keys.dtype == torch.float8_e4m3fn, M=ROTATED, num_warps=4, enable_fp_fusion=False,  # the bits of `apply_rope`
    )  # fmt: skip


@triton.jit
def _tiles(  # type: ignore[no-untyped-def]
    out, total, highest, q, K, V, TABLE, k0, k2, v0, v2, position, begin, stop, end, scale, kv_scale, MASKED: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Process the tiles of keys from `begin` to `stop`; all queries see every key unless `MASKED`."""
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    for at in range(begin, stop, N):
        n = at + tl.arange(0, N)
        if PAGE % N == 0:  # one page, whose tokens are contiguous
            page = tl.load(TABLE + at // PAGE).to(tl.int64)
            place = at % PAGE + tl.arange(0, N)
            if WINDOW:
                page = tl.maximum(page, 0)  # the page may be freed
            keys, values = K + page * k0 + place * k2, V + page * v0 + place * v2
        else:
            pages = tl.load(TABLE + n // PAGE, mask=n < end, other=0).to(tl.int64)
            if WINDOW:
                pages = tl.maximum(pages, 0)
            keys, values = K + pages * k0 + n % PAGE * k2, V + pages * v0 + n % PAGE * v2
        if D == WIDTH:
            k = tl.load(keys[None, :] + d[:, None])
        else:
            k = tl.load(keys[None, :] + d[:, None], mask=(d < WIDTH)[:, None], other=0.0)
        if MASKED:
            there = n < end
            if WINDOW:
                there = there & (n > tl.min(position, 0) - WINDOW)
            v = tl.load(
                values[:, None] + dv[None, :],
                mask=there[:, None] & (dv < V_WIDTH)[None, :],  # values that no query sees may be NaN
                other=0.0,
            )
        elif DV == V_WIDTH:
            v = tl.load(values[:, None] + dv[None, :])
        else:
            v = tl.load(values[:, None] + dv[None, :], mask=(dv < V_WIDTH)[None, :], other=0.0)
        if FP8:
            k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, k, input_precision="ieee") * (scale * kv_scale if FP8 else scale)
        if MASKED:
            seen = n[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (position[:, None] - n[None, :] < WINDOW)
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher) if WINDOW else higher
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(p, 1)
        if FP8:
            p = p * kv_scale
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        highest = higher
    return out, total, highest


@triton.jit(do_not_specialize_on_alignment=[*INDICES, "CU_SEQLENS", "TILES"])
def _attend(  # type: ignore[no-untyped-def]
    Q, K, V, TABLE, SLOTS, STARTS, CU_SEQLENS, TILES, OUT, q0, q1, k0, k1, k2, v0, v1, v2, pages, scale, kv_scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, FP8: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of new tokens of one sequence, for one head."""
    tile, head = tl.program_id(1), tl.program_id(0)
    sequence, first = tl.load(TILES + 2 * tile), tl.load(TILES + 2 * tile + 1)
    begin, stop = tl.load(CU_SEQLENS + sequence), tl.load(CU_SEQLENS + sequence + 1)
    start, slot = tl.load(STARTS + sequence), tl.load(SLOTS + sequence).to(tl.int64)
    m, d, dv = first + tl.arange(0, M), tl.arange(0, D), tl.arange(0, DV)
    token = begin + m
    here = token < stop
    position = start + m
    q = tl.load(
        Q + token[:, None].to(tl.int64) * q0 + head * q1 + d[None, :],
        mask=here[:, None] & (d < WIDTH)[None, :],
        other=0.0,
    )
    highest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, DV), tl.float32)
    end = start + tl.minimum(first + M, stop - begin)
    if WINDOW:
        whole = tl.maximum(start + first + 1 - WINDOW, 0) // N * N
    else:  # all queries see the keys up to the first query
        whole = (start + first + 1) // N * N
    kv = head // GROUP
    K, V, TABLE = K + kv * k1, V + kv * v1, TABLE + slot * pages
    if not WINDOW:
        out, total, highest = _tiles(
            out, total, highest, q, K, V, TABLE, k0, k2, v0, v2, position, 0, whole, end, scale, kv_scale, False,
            WIDTH, V_WIDTH, D, DV, PAGE, WINDOW, FP8, N,
        )  # fmt: skip
    out, total, highest = _tiles(
        out, total, highest, q, K, V, TABLE, k0, k2, v0, v2, position, whole, end, end, scale, kv_scale, True,
        WIDTH, V_WIDTH, D, DV, PAGE, WINDOW, FP8, N,
    )  # fmt: skip
    out = out / total[:, None]
    tl.store(
        OUT + (token[:, None].to(tl.int64) * HEADS + head) * V_WIDTH + dv[None, :],
        out.to(OUT.dtype.element_ty),
        mask=here[:, None] & (dv < V_WIDTH)[None, :],
    )


def tiles_of(counts: tuple[int, ...], rows: int, first: int = 0) -> list[int]:
    """Pairs of a sequence and its tile's first new token, one for each tile: `paged_attention` runs over them. The last tile of
    each sequence comes first, since it takes longest."""
    return [each for n, count in enumerate(counts, first) for m in reversed(range(0, count, rows)) for each in (n, m)]


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor, starts: Tensor, cu_seqlens: Tensor, tiles: Tensor,
    tile: PromptTile, out: Tensor, scale: float, window: int = 0, kv_scale: float = 1.0,
) -> None:  # fmt: skip
    """Attention of new tokens [tokens, heads, width] whose keys are in their pages, to `out` [tokens, heads, value width]. `tiles`
    are those of all new tokens, from `tiles_of` with the rows of `tile`."""
    heads, width, v_width = q.shape[1], q.shape[2], out.shape[2]
    wide = triton.next_power_of_2(width)
    _attend[heads, len(tiles) // 2](
        q, keys, values, table, slots, starts, cu_seqlens, tiles, out, q.stride(0), q.stride(1), *keys.stride()[:3],
        *values.stride()[:3], table.stride(0), scale * LOG2E, kv_scale, GROUP=heads // keys.shape[1], HEADS=heads, WIDTH=width,
        V_WIDTH=v_width, D=wide, DV=triton.next_power_of_2(v_width), PAGE=keys.shape[2], WINDOW=window,
        FP8=keys.dtype == torch.float8_e4m3fn, M=tile.rows, N=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
