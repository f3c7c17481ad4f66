"""Attention of one new token of each of many sequences to the pages of their keys and values, as one kernel. It norms queries and
the new key where the model does so, rotates them, writes the new key and value to their page, and attends to all tokens.

The limit is reading the pages once. So the heads of a group, which share keys, are one program, padded to the 16 rows that tensor
cores take; and where there are few sequences, each sequence's keys are split over several programs (flash decoding, Dao et al.
2023). Each stores its partial result with its maximum and sum; the last to finish merges them, so no second kernel is launched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.attention.tiles import DecodeTile, decode_tile
from shardwise.model.kernels.dependent_launch import has_dependent_launch

LOG2E = 1.4426950408889634
PROGRAMS = 128
"""How many programs keep the memory of a large GPU busy, one on each multiprocessor; with fewer, sequences are split."""
ALONE = 384
"""Up to this many keys, one program is faster than several that merge their partial results."""
EARLY = 8
"""Sequences up to which a step's kernels are so short that each begins before the previous one has ended
(`dependent_launch.py`)."""
INDICES = ["SLOTS", "STARTS"]
"""Integer arguments that are slices of one copy to the device: kernels are compiled once for all their alignments."""


@triton.jit
def _rotated(x1, x2, cos, sin, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of heads, rotated in float32."""
    first = x1 * cos - x2 * sin
    second = x2 * cos + x1 * sin
    return first.to(dtype), second.to(dtype)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _decode(  # type: ignore[no-untyped-def]
    QKV, COS, SIN, Q_NORM, K_NORM, K, V, TABLE, SLOTS, STARTS, OUT, PART, HIGHEST, TOTAL, ARRIVED, kv_scale,
    row, pages, scale, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, ROPE: tl.constexpr, QK_NORM: tl.constexpr,
    FP8: tl.constexpr, N: tl.constexpr, ALONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:  # the next kernel may load its weights; the previous one must have ended
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(SLOTS + sequence).to(tl.int64)
    start = tl.load(STARTS + sequence)
    low = tl.maximum(start + 1 - WINDOW, 0) if WINDOW else 0
    first_tile = low // N
    tiles = tl.cdiv(start, N) - first_tile
    share = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    if tiles <= ALONE:
        share = ALONE
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    if split >= active:
        return
    HALF: tl.constexpr = D // 2
    dtype = QKV.dtype.element_ty
    g, d, half = tl.arange(0, G), tl.arange(0, D), tl.arange(0, HALF)
    real = g < GROUP
    at = QKV + sequence.to(tl.int64) * row
    query = at + (head * GROUP + g)[:, None] * D
    q1 = tl.load(query + half[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    q2 = tl.load(query + HALF + half[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    key = at + (HEADS + head) * D
    k1 = tl.load(key + half).to(tl.float32)
    k2 = tl.load(key + HALF + half).to(tl.float32)
    if QK_NORM:
        q_rms = tl.rsqrt((tl.sum(q1 * q1, 1) + tl.sum(q2 * q2, 1)) / D + eps)
        k_rms = tl.rsqrt((tl.sum(k1 * k1, 0) + tl.sum(k2 * k2, 0)) / D + eps)
        q1 = (q1 * q_rms[:, None] * tl.load(Q_NORM + half)[None, :]).to(dtype).to(tl.float32)
        q2 = (q2 * q_rms[:, None] * tl.load(Q_NORM + HALF + half)[None, :]).to(dtype).to(tl.float32)
        k1 = (k1 * k_rms * tl.load(K_NORM + half)).to(dtype).to(tl.float32)
        k2 = (k2 * k_rms * tl.load(K_NORM + HALF + half)).to(dtype).to(tl.float32)
    if ROPE:
        cos, sin = tl.load(COS + start * HALF + half), tl.load(SIN + start * HALF + half)
        q1, q2 = _rotated(q1, q2, cos[None, :], sin[None, :], dtype)
        k1, k2 = _rotated(k1, k2, cos, sin, dtype)
    else:
        q1, q2, k1, k2 = q1.to(dtype), q2.to(dtype), k1.to(dtype), k2.to(dtype)
    highest = tl.full((G,), float("-inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    out = tl.zeros((G, D), tl.float32)
    if split == active - 1:  # this program attends to the new token, from registers, and writes it
        v = tl.load(at + (HEADS + KV_HEADS + head) * D + d)
        last = tl.load(TABLE + slot * pages + start // PAGE).to(tl.int64)
        own_place = ((last * KV_HEADS + head) * PAGE + start % PAGE) * D
        if FP8:
            inverse = 1.0 / kv_scale
            k1s, k2s = (
                (k1.to(tl.float32) * inverse).to(K.dtype.element_ty),
                (k2.to(tl.float32) * inverse).to(K.dtype.element_ty),
            )
            vs = (v.to(tl.float32) * inverse).to(K.dtype.element_ty)
            k1, k2 = (k1s.to(tl.float32) * kv_scale).to(dtype), (k2s.to(tl.float32) * kv_scale).to(dtype)
            v = (vs.to(tl.float32) * kv_scale).to(dtype)
            tl.store(K + own_place + half, k1s)
            tl.store(K + own_place + HALF + half, k2s)
            tl.store(V + own_place + d, vs)
        else:
            tl.store(K + own_place + half, k1)
            tl.store(K + own_place + HALF + half, k2)
            tl.store(V + own_place + d, v)
        own = tl.sum(q1.to(tl.float32) * k1.to(tl.float32)[None, :], 1) + tl.sum(
            q2.to(tl.float32) * k2.to(tl.float32)[None, :], 1
        )
        highest = own * scale
        total = tl.full((G,), 1.0, tl.float32)
        out = tl.zeros((G, D), tl.float32) + v.to(tl.float32)[None, :]
    begin = (first_tile + split * share) * N
    end = tl.minimum(begin + share * N, start)
    TABLE += slot * pages
    following = tl.load(TABLE + begin // PAGE, mask=begin < end, other=0)
    for first in range(begin, end, N):
        n = first + tl.arange(0, N)
        seen = n < end
        if WINDOW:
            seen = seen & (n >= low)
        if PAGE % N == 0:  # one page, looked up one tile earlier
            page = following.to(tl.int64)
            following = tl.load(TABLE + (first + N) // PAGE, mask=first + N < end, other=0)
            if WINDOW:
                page = tl.maximum(page, 0)  # the page may be freed
            place = (page * KV_HEADS + head) * (PAGE * D) + (first % PAGE + tl.arange(0, N)) * D
        else:
            each = tl.load(TABLE + n // PAGE, mask=n < end, other=0).to(tl.int64)
            if WINDOW:
                each = tl.maximum(each, 0)
            place = ((each * KV_HEADS + head) * PAGE + n % PAGE) * D
        keys1 = tl.load(K + place[None, :] + half[:, None])
        keys2 = tl.load(K + place[None, :] + HALF + half[:, None])
        # Values that are not seen may be anything, even NaN, and zero times NaN is not zero.
        values = tl.load(V + place[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        if FP8:
            keys1, keys2, values = keys1.to(dtype), keys2.to(dtype), values.to(dtype)
        s = tl.dot(q1, keys1, input_precision="ieee")
        s = tl.dot(q2, keys2, s, input_precision="ieee") * (scale * kv_scale if FP8 else scale)
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(p, 1)
        if FP8:
            p = p * kv_scale
        out = tl.dot(p.to(dtype), values, out * shrink[:, None], input_precision="ieee")
        highest = higher
    where = OUT + sequence.to(tl.int64) * HEADS * D + (head * GROUP + g)[:, None] * D + d[None, :]
    if active == 1:
        tl.store(where, (out / total[:, None]).to(OUT.dtype.element_ty), mask=real[:, None])
        return
    group = sequence * KV_HEADS + head
    mine = (group.to(tl.int64) * SPLITS + split) * GROUP + g
    tl.store(PART + mine[:, None] * D + d[None, :], out, mask=real[:, None])
    tl.store(HIGHEST + mine, highest, mask=real)
    tl.store(TOTAL + mine, total, mask=real)
    tl.debug_barrier()
    if tl.atomic_add(ARRIVED + group, 1, sem="acq_rel") == active - 1:
        tl.store(ARRIVED + group, 0)
        parts = tl.arange(0, SPLITS)
        there = parts < active
        for one in range(GROUP):
            its = (group.to(tl.int64) * SPLITS + parts) * GROUP + one
            high = tl.load(HIGHEST + its, mask=there, other=float("-inf"), cache_modifier=".cg")
            weight = tl.exp2(high - tl.max(high, 0))
            sums = tl.load(TOTAL + its, mask=there, other=0.0, cache_modifier=".cg") * weight
            part = tl.load(PART + its[:, None] * D + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
            merged = tl.sum(part * weight[:, None], 0) / tl.sum(sums, 0)
            into = OUT + sequence.to(tl.int64) * HEADS * D + (head * GROUP + one) * D + d
            tl.store(into, merged.to(OUT.dtype.element_ty))


class Scratch:
    """Scratch memory for the programs' partial results, for this many sequences; the layers use it one after the other."""

    def __init__(self, sequences: int, heads: int, kv_heads: int, width: int, device: torch.device) -> None:
        self.sequences, self.kv_heads = sequences, kv_heads
        most = max(b * self.splits(b) for b in range(1, sequences + 1)) * heads
        self.part = torch.empty(most, width, dtype=torch.float32, device=device)
        self.highest = torch.empty(most, dtype=torch.float32, device=device)
        self.total = torch.empty(most, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(sequences * kv_heads, dtype=torch.int32, device=device)

    def splits(self, sequences: int) -> int:
        """How many programs share the keys of a sequence: a power of two, since the kernel is compiled for each number."""
        return min(64, triton.next_power_of_2(triton.cdiv(PROGRAMS, sequences * self.kv_heads)))


def decode_attention(
    qkv: Tensor, rope: tuple[Tensor, Tensor] | None, norms: tuple[Tensor, Tensor, float] | None, keys: Tensor, values: Tensor,
    table: Tensor, slots: Tensor, starts: Tensor, scratch: Scratch, heads: int, scale: float, window: int = 0,
    kv_scale: float = 1.0, tile: DecodeTile | None = None,
) -> Tensor:  # fmt: skip
    """New tokens' queries, keys and values [sequences, all heads x width], as one matrix returns them, to the output of attention
    [sequences, heads x width]. `rope` are float32 tables [positions, width / 2]; `norms` the weights of query and key norms, and
    their epsilon."""
    sequences = qkv.shape[0]
    _, kv_heads, page, width = keys.shape
    out = qkv.new_empty(sequences, heads * width)
    splits, tile = scratch.splits(sequences), tile or decode_tile(sequences, width, keys.device)
    early = sequences <= EARLY and qkv.is_cuda and has_dependent_launch(qkv.device)
    cos, sin = rope if rope is not None else (qkv, qkv)
    q_norm, k_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    _decode[splits, kv_heads, sequences](
        qkv, cos, sin, q_norm, k_norm, keys, values, table, slots, starts, out,
        scratch.part, scratch.highest, scratch.total, scratch.arrived, kv_scale, qkv.stride(0), table.stride(0), scale * LOG2E, eps,
        HEADS=heads, KV_HEADS=kv_heads, G=max(16, triton.next_power_of_2(heads // kv_heads)), GROUP=heads // kv_heads, D=width,
        PAGE=page, SPLITS=splits, WINDOW=window, ROPE=rope is not None, QK_NORM=norms is not None,
        FP8=keys.dtype == torch.float8_e4m3fn, N=tile.keys, ALONE=ALONE // tile.keys,
        EARLY=early, num_warps=tile.warps, num_stages=tile.stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
