"""Attention of some queries to some keys of a longer sequence. Each query attends to the keys between two bounds: the start of its
document or of its window, and its own position. Output and log-sum-exp are float32, so that partial results of a row can be
merged.

Positions and bounds increase, so the tiles of keys that some query of a tile sees lie side by side: a program finds the first and
the last of them by bisection and loads the others ahead of their use (flash attention, Dao 2023). A condition on each tile would
keep the compiler from that. The backward pass takes the output and the log-sum-exp of whole rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    X, at, stride, column, inside, WIDTH: tl.constexpr
):
    """A tile of the rows `at`, with zeros outside the matrix."""
    return tl.load(
        X + at[:, None] * stride + column[None, :], mask=inside[:, None] & (column[None, :] < WIDTH), other=0.0
    )


@triton.jit
def _tiles_below(  # type: ignore[no-untyped-def]
    BOUNDS, count, bound, N: tl.constexpr, LAST: tl.constexpr
):
    """Tiles of increasing bounds whose first is below `bound`, or even the `LAST`."""
    low = tl.program_id(0) * 0  # no constant, which a loop could not change
    high = low + tl.cdiv(count, N)
    while low < high:
        middle = (low + high) // 2
        at = tl.minimum((middle + 1) * N, count) - 1 if LAST else middle * N
        below = tl.load(BOUNDS + at) < bound
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
    return low


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q, k, low, place, key_place, valid, scale
):
    """Scaled scores in units of log 2, -inf outside the bounds."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (key_place[None, :] >= low[:, None]) & (key_place[None, :] <= place[:, None]) & valid[None, :]
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _tiles(  # type: ignore[no-untyped-def]
    out, total, highest, q, q_rest, K, V, k2, v2, d, d_rest, dv, at, start, stop, keys, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Process the tiles of keys from `start` to `stop`; all queries see every key unless `MASKED`."""
    for first in range(start, stop, N):
        n = first + tl.arange(0, N)
        if MASKED:
            k = tl.load(K + n[None, :] * k2 + d[:, None], mask=(n < keys)[None, :], other=0.0)
            v = tl.load(V + n[:, None] * v2 + dv[None, :], mask=(n < keys)[:, None], other=0.0)
        else:
            k = tl.load(K + n[None, :] * k2 + d[:, None])
            v = tl.load(V + n[:, None] * v2 + dv[None, :])
        s = tl.dot(q, k, input_precision="ieee")
        if REST:
            k_rest = tl.load(K + n[None, :] * k2 + d_rest[:, None], mask=(n < keys)[None, :], other=0.0)
            s = tl.dot(q_rest, k_rest, s, input_precision="ieee")
        s = s * scale
        if MASKED:
            seen = (n < keys)[None, :]
            if CAUSAL:
                seen = seen & (n[None, :] <= at[:, None])
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        out = out * shrink[:, None]
        out = tl.dot(p.to(v.dtype), v, out, input_precision="ieee")
        highest = higher
    return out, total, highest


@triton.jit
def _whole_attention(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, LSE, q0, q1, q2, k0, k1, k2, v0, v1, v2, queries, keys, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """All keys, or those up to each query. Heads are a power of two wide, or two of them, D and REST (192 is 128 and 64), so only
    the last tiles need masks."""
    head = tl.program_id(1) % HEADS
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    # The longest tiles first: they would end last.
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    at = tile * M + tl.arange(0, M)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    here = at < queries
    Q += row * q0 + head * q1
    q = tl.load(Q + at[:, None] * q2 + d[None, :], mask=here[:, None], other=0.0)
    d_rest, q_rest = d, q
    if REST:
        d_rest = D + tl.arange(0, REST)
        q_rest = tl.load(Q + at[:, None] * q2 + d_rest[None, :], mask=here[:, None], other=0.0)
    K += row * k0 + (head // GROUPS) * k1
    V += row * v0 + (head // GROUPS) * v1
    highest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, DV), tl.float32)
    stop = tl.minimum((tile + 1) * M, keys) if CAUSAL else keys
    whole = (tile * M // N * N) if CAUSAL else keys // N * N
    out, total, highest = _tiles(
        out, total, highest, q, q_rest, K, V, k2, v2, d, d_rest, dv, at, 0, whole, keys, scale, False, CAUSAL, N, REST
    )  # fmt: skip
    out, total, highest = _tiles(
        out, total, highest, q, q_rest, K, V, k2, v2, d, d_rest, dv, at, whole, stop, keys, scale, True, CAUSAL, N, REST
    )  # fmt: skip
    out = out / total[:, None]
    sums = tl.program_id(1).to(tl.int64) * queries + at
    tl.store(OUT + sums[:, None] * DV + dv[None, :], out, mask=here[:, None])
    tl.store(LSE + sums, (highest + tl.log2(total)) * 0.6931471805599453, mask=here)


@triton.jit
def _bounded_attention(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, LSE, LOW, PLACE, KEY_PLACE,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2, low0,
    queries, keys, scale, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) % HEADS
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    at = tl.program_id(0) * M + tl.arange(0, M)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    here = at < queries
    q = _rows(Q + row * q0 + head * q1, at, q2, d, here, WIDTH)
    place = tl.load(PLACE + at, mask=here, other=-1)
    low = tl.load(LOW + row * low0 + at, mask=here, other=2147483647)
    first, last = tl.min(low, 0), tl.max(place, 0)
    highest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, DV), tl.float32)
    start = _tiles_below(KEY_PLACE, keys, first, N, True) * N
    stop = _tiles_below(KEY_PLACE, keys, last + 1, N, False) * N
    for tile in range(start, stop, N):
        n = tile + tl.arange(0, N)
        valid = n < keys
        key_place = tl.load(KEY_PLACE + n, mask=valid, other=0)
        k = _rows(K + row * k0 + (head // GROUPS) * k1, n, k2, d, valid, WIDTH)
        v = _rows(V + row * v0 + (head // GROUPS) * v1, n, v2, dv, valid, V_WIDTH)
        s = _scores(q, k, low, place, key_place, valid, scale)
        higher = tl.maximum(highest, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        highest = higher
    some = total > 0
    out = out / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (highest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(
        OUT + row * o0 + head * o1 + at[:, None] * o2 + dv[None, :], out, mask=here[:, None] & (dv[None, :] < V_WIDTH)
    )
    tl.store(LSE + tl.program_id(1).to(tl.int64) * queries + at, lse, mask=here)


@triton.jit
def _attention_backward_q(  # type: ignore[no-untyped-def]
    Q, K, V, GRAD, LSE, DELTA, DQ, LOW, PLACE, KEY_PLACE,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, g0, g1, g2, low0,
    queries, keys, scale, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) % HEADS
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    at = tl.program_id(0) * M + tl.arange(0, M)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    here = at < queries
    q = _rows(Q + row * q0 + head * q1, at, q2, d, here, WIDTH)
    grad = _rows(GRAD + row * g0 + head * g1, at, g2, dv, here, V_WIDTH)
    sums = tl.program_id(1).to(tl.int64) * queries + at
    lse = tl.load(LSE + sums, mask=here, other=0.0) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = tl.load(DELTA + sums, mask=here, other=0.0)
    place = tl.load(PLACE + at, mask=here, other=-1)
    low = tl.load(LOW + row * low0 + at, mask=here, other=2147483647)
    first, last = tl.min(low, 0), tl.max(place, 0)
    dq = tl.zeros((M, D), tl.float32)
    start = _tiles_below(KEY_PLACE, keys, first, N, True) * N
    stop = _tiles_below(KEY_PLACE, keys, last + 1, N, False) * N
    for tile in range(start, stop, N):
        n = tile + tl.arange(0, N)
        valid = n < keys
        key_place = tl.load(KEY_PLACE + n, mask=valid, other=0)
        k = _rows(K + row * k0 + (head // GROUPS) * k1, n, k2, d, valid, WIDTH)
        v = _rows(V + row * v0 + (head // GROUPS) * v1, n, v2, dv, valid, V_WIDTH)
        p = tl.exp2(_scores(q, k, low, place, key_place, valid, scale) - lse[:, None])
        inner = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(inner.to(k.dtype), k, dq, input_precision="ieee")
    out = (tl.program_id(1).to(tl.int64) * queries + at[:, None]) * WIDTH + d[None, :]
    tl.store(DQ + out, dq * scale * 0.6931471805599453, mask=here[:, None] & (d[None, :] < WIDTH))


@triton.jit
def _attention_backward_kv(  # type: ignore[no-untyped-def]
    Q, K, V, GRAD, LSE, DELTA, DK, DV_OUT, LOW, PLACE, KEY_PLACE,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, g0, g1, g2, low0,
    queries, keys, scale, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1) % (HEADS // GROUPS)
    row = (tl.program_id(1) // (HEADS // GROUPS)).to(tl.int64)
    n = tl.program_id(0) * N + tl.arange(0, N)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    valid = n < keys
    k = _rows(K + row * k0 + kv_head * k1, n, k2, d, valid, WIDTH)
    v = _rows(V + row * v0 + kv_head * v1, n, v2, dv, valid, V_WIDTH)
    key_place = tl.load(KEY_PLACE + n, mask=valid, other=2147483647)
    begin = tl.min(key_place, 0)
    end = tl.max(tl.where(valid, key_place, -1), 0)
    start = _tiles_below(PLACE, queries, begin, M, True) * M
    stop = _tiles_below(LOW + row * low0, queries, end + 1, M, False) * M
    dk, dv_sum = tl.zeros((N, D), tl.float32), tl.zeros((N, DV), tl.float32)
    for member in range(GROUPS):
        head = kv_head * GROUPS + member
        sums = (row * HEADS + head) * queries
        for tile in range(start, stop, M):
            at = tile + tl.arange(0, M)
            here = at < queries
            place = tl.load(PLACE + at, mask=here, other=-1)
            low = tl.load(LOW + row * low0 + at, mask=here, other=2147483647)
            q = _rows(Q + row * q0 + head * q1, at, q2, d, here, WIDTH)
            grad = _rows(GRAD + row * g0 + head * g1, at, g2, dv, here, V_WIDTH)
            lse = tl.load(LSE + sums + at, mask=here, other=0.0) * 1.4426950408889634
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            delta = tl.load(DELTA + sums + at, mask=here, other=0.0)
            p = tl.exp2(_scores(q, k, low, place, key_place, valid, scale) - lse[:, None])
            dv_sum = tl.dot(tl.trans(p.to(grad.dtype)), grad, dv_sum, input_precision="ieee")
            inner = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
            dk = tl.dot(tl.trans(inner.to(q.dtype)), q, dk, input_precision="ieee")
    out = tl.program_id(1).to(tl.int64) * keys + n[:, None]
    tl.store(DK + out * WIDTH + d[None, :], dk * scale * 0.6931471805599453, mask=valid[:, None] & (d[None, :] < WIDTH))
    tl.store(DV_OUT + out * V_WIDTH + dv[None, :], dv_sum, mask=valid[:, None] & (dv[None, :] < V_WIDTH))


def _sizes(q: Tensor, k: Tensor, v: Tensor, backward: bool) -> tuple[dict[str, int], dict[str, int]]:
    width, v_width = q.shape[-1], v.shape[-1]
    d, dv = (max(16, triton.next_power_of_2(one)) for one in (width, v_width))
    wide = max(d, dv) > 128
    tile = (64 if wide or backward else 128, 32 if wide else 64)
    shape = dict(HEADS=q.shape[1], GROUPS=q.shape[1] // k.shape[1], WIDTH=width, V_WIDTH=v_width, D=d, DV=dv)
    return shape | dict(M=tile[0], N=tile[1]), dict(
        num_warps=8 if max(d, dv) >= 128 else 4, num_stages=2 if wide or backward else 3
    )


def _by_element(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose last dimension is contiguous, as the kernels need it."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def bounded_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, low: Tensor, place: Tensor, key_place: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries [batch, heads, queries, width] to keys and values with the same number of heads or fewer. Query i has position
    `place[i]` and attends to the keys j with `low[batch, i] <= key_place[j] <= place[i]`. `place`, `key_place` and `low` increase
    along a row, or stay. Returns output and log-sum-exp."""
    q, k, v = _by_element(q, k, v)
    batch, heads, queries, _ = q.shape
    out = torch.empty(batch, heads, queries, v.shape[-1], dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    shape, how = _sizes(q, k, v, backward=False)
    _bounded_attention[(triton.cdiv(queries, shape["M"]), batch * heads)](
        q, k, v, out, lse, low, place, key_place,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], low.stride(0) if len(low) > 1 else 0,
        queries, k.shape[2], scale * LOG2E, **shape, **how,
    )  # fmt: skip
    return out, lse


def bounded_attention_backward(
    grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float,
    low: Tensor, place: Tensor, key_place: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v in float32, given the log-sum-exp of whole rows and `delta`, the row sums of grad x output."""
    q, k, v, grad = _by_element(q, k, v, grad)
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    shape, how = _sizes(q, k, v, backward=True)
    strides = (
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *grad.stride()[:3],
        low.stride(0) if len(low) > 1 else 0,
    )
    rest = (*strides, queries, keys, scale * LOG2E)
    lse, delta = lse.contiguous(), delta.contiguous()
    _attention_backward_q[(triton.cdiv(queries, shape["M"]), batch * heads)](
        q, k, v, grad, lse, delta, dq, low, place, key_place, *rest, **shape, **how
    )  # fmt: skip
    _attention_backward_kv[(triton.cdiv(keys, shape["N"]), batch * k.shape[1])](
        q, k, v, grad, lse, delta, dk, dv, low, place, key_place, *rest, **shape, **how
    )  # fmt: skip
    return dq, dk, dv


def whole_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The same where every query sees every key or, if `causal`, where there are as many queries as keys and each sees those up to
    itself. PyTorch's kernels round their outputs to 16 bits, so merging would round once more for every block."""
    q, k, v = _by_element(q, k, v)
    (batch, heads, queries, width), v_width, keys = q.shape, v.shape[-1], k.shape[2]
    most = 1 << (width.bit_length() - 1)  # the largest power of two in it
    rest = width - most
    if any(n < 16 or n & (n - 1) for n in (most, rest or most, v_width)):
        place = torch.arange(max(queries, keys), device=q.device, dtype=torch.int32)
        at = place[:queries] if causal else torch.full_like(place[:queries], keys)
        return bounded_attention(q, k, v, scale, torch.zeros_like(at)[None], at, place[:keys])
    out = torch.empty(batch, heads, queries, v_width, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if max(width, v_width) <= 128:
        tile, how = (128, 128), dict(num_warps=8, num_stages=3)
    elif width <= 192 and v_width <= 128:  # of DeepSeek: shared memory has room for three tiles of 64 keys
        tile, how = (128, 64), dict(num_warps=8, num_stages=3)
    else:
        tile, how = (64, 32), dict(num_warps=4)
    _whole_attention[(triton.cdiv(queries, tile[0]), batch * heads)](
        q, k, v, out, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], queries, keys, scale * LOG2E,
        HEADS=heads, GROUPS=heads // k.shape[1], D=most, REST=rest, DV=v_width, CAUSAL=causal, M=tile[0], N=tile[1], **how,
    )  # fmt: skip
    return out, lse
