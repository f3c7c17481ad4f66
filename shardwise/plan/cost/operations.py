"""Every operation of a layer, of the embedding and of the head, for one microbatch on one rank, as closed forms.

An `Entry` is one operation with what it does forward, backward to its input and backward to its weights: operations, bytes
moved, seconds on the job's chip, what it keeps for the backward pass, what it sends. Recomputation repeats entries. With T
tokens of a microbatch on a rank, widths h (hidden), q, kv (all heads of queries, of keys), f (feed-forward), t tensor ranks:

    qkv       T x (q+2kv)/t from h      attention   T x s scores of q/t, half of them when causal
    out       T x h from q/t            up, gate    T x f/t from h         down   T x h from f/t
    experts   as up, gate and down on T k/t rows spread over the rank's experts        head   T x V/t from h

Backward each product costs its forward twice: once for its input, once for its weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.hardware import Operation, attention_seconds, collective_seconds, gemm_seconds
from shardwise.hardware.attention import Direction, Kernel
from shardwise.plan.cost.flops import keys_seen
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.ops import Entry, Number, Tally, span


def _enter(tally: Tally, part: str) -> None:
    """What gathers the sequence before matrices cut by columns, and adds up their gradients."""
    job = tally.job
    size = job.rows * job.model.hidden * job.width
    if job.stack.sequence_parallel:
        tally.exchange(part, "tensor", "all_gather", size, (1.0, 0.0, 0.0))
        tally.exchange(part, "tensor", "reduce_scatter", size, (0.0, 1.0, 0.0))
    else:
        tally.exchange(part, "tensor", "all_reduce", size, (0.0, 1.0, 0.0))


def _leave(tally: Tally, part: str, *, ends: bool = False) -> None:
    """What adds up the partial sums of matrices cut by rows."""
    job = tally.job
    size = job.rows * job.model.hidden * job.width
    if job.stack.sequence_parallel:
        tally.exchange(part, "tensor", "reduce_scatter", size, (1.0, 0.0, 0.0), ends=ends)
        tally.exchange(part, "tensor", "all_gather", size, (0.0, 1.0, 0.0))
    else:
        tally.exchange(part, "tensor", "all_reduce", size, (1.0, 0.0, 0.0), ends=ends)


def pieces(job: Job) -> Number:
    """Tokens of the residual stream on a rank, between the matrices."""
    return job.rows / job.layout.tensor if job.stack.sequence_parallel else job.rows


def entered_bytes(job: Job) -> Number:
    """What matrices cut by columns keep of their common input."""
    tokens = job.rows if job.stack.keeps_gathered else pieces(job)
    return tokens * job.model.hidden * job.width


def _norm(tally: Tally, tokens: Number, width: Number = 0) -> None:
    job = tally.job
    size = tokens * (width or job.model.hidden) * job.width
    tally.stream("norm", "norm", 2 * size, 3 * size, saved=size)


def _ffn_norm(tally: Tally) -> None:
    """The norm before the feed-forward layer; a parallel block has none."""
    if not tally.job.model.parallel_block:
        _norm(tally, pieces(tally.job))


def _ffn_input_bytes(job: Job) -> Number:
    """What the feed-forward layer keeps of its input. In a parallel block that is attention's, but gathered once more."""
    if not job.model.parallel_block:
        return entered_bytes(job)
    return entered_bytes(job) * (job.layout.tensor > 1) * job.stack.keeps_gathered


def _residual(tally: Tally, part: str, *, ends: bool = False) -> None:
    """The sum with the stream, with dropout's mask where there is dropout."""
    job = tally.job
    numbers = pieces(job) * job.model.hidden
    mask = numbers * 1.0 if job.stack.dropout else 0.0
    eager = 2.0 if job.stack.dropout and job.stack.kernels == "eager" else 1.0
    moved = 3 * job.width * numbers * eager + mask, 2 * job.width * numbers + mask
    tally.stream("residual", part, *moved, saved=mask, ends=ends)


def _attention_core(tally: Tally, heads: Number, kv_heads: Number, head_dim: int, v_dim: int) -> None:
    job = tally.job
    chip, stack, lay = job.cluster.chip, job.stack, job.layout
    length, batch, width = job.seq_len, job.microbatch, job.width
    queries = length / lay.context
    seen = keys_seen(job.model, length)
    flops = 2.0 * batch * queries * seen * heads * (head_dim + v_dim)
    inputs = batch * queries * (heads * head_dim + kv_heads * (head_dim + v_dim)) * width
    if stack.attention == "unfused":
        full = 2.0 * batch * heads * queries * length
        for name, columns, inner in (("scores", length, head_dim), ("values", v_dim, length)):
            one = gemm_seconds(chip, queries, columns, inner, job.dtype, count=batch * heads)
            two = gemm_seconds(chip, queries, inner, columns, job.dtype, count=batch * heads)
            three = gemm_seconds(chip, inner, columns, queries, job.dtype, count=batch * heads)
            part_flops = full * (head_dim if name == "scores" else v_dim)
            tally.entries.append(
                Entry(name, "attention", "attention", (one, two + three, 0.0), (part_flops, 2 * part_flops, 0.0),
                      saved=inputs if name == "scores" else 0.0, kept=inputs if name == "scores" else 0.0,
                      launches=(1.0, 2.0, 0.0), core=True)
            )  # fmt: skip
        numbers = batch * heads * queries * length
        drop = 1.0 if stack.dropout else 0.0
        move = numbers * (2 * width + drop * (2 * width + 1)), numbers * (3 * width + drop * (2 * width + 1))
        tally.stream(
            "softmax", "attention", *move, saved=numbers * (width + drop * (width + 1)), core=True, launches=(2.0, 2.0)
        )
        return
    share = seen / length
    shape = dict(batch=batch, heads=heads, queries=queries, keys=2 * share * length, head_dim=head_dim, v_dim=v_dim)
    shape |= dict(causal=True, dtype=job.dtype, kv_heads=kv_heads)
    forward, backward = (_fused_seconds(job, stack.attention, way, shape) for way in ("forward", "backward"))
    # The output is kept by the product that follows.
    tally.entries.append(
        Entry("attention", "attention", "attention", (forward, backward, 0.0), (flops, 2.5 * flops, 0.0),
              saved=inputs + 4 * batch * queries * heads, kept=inputs, launches=(2.0, 3.0, 0.0), core=True)
    )  # fmt: skip


def _fused_seconds(job: Job, kernel: Kernel, direction: Direction, shape: dict[str, Any]) -> Number:
    """Of attention in one kernel; of a sequence in pieces by the one for those."""
    chip, lay, other = job.cluster.chip, job.layout, job.stack.context_attention
    whole = attention_seconds(chip, **shape, kernel=kernel, direction=direction)
    if other is None or lay.context_method == "ulysses":
        return whole
    return np.where(lay.context > 1, attention_seconds(chip, **shape, kernel=other, direction=direction), whole)


def _context_traffic(tally: Tally, heads: Number, kv_heads: Number, head_dim: int, v_dim: int) -> None:
    """What attention needs from the other parts of the sequence (`parallel/context.py`)."""
    job = tally.job
    method, c = job.layout.context_method, job.layout.context
    keys = job.rows * kv_heads * (head_dim + v_dim) * job.width
    if method == "ulysses":
        queries = job.rows * heads * (head_dim + v_dim) * job.width
        tally.exchange("attention", "context", "all_to_all", queries + keys, (1.0, 1.0, 0.0))
    elif method == "gather":
        tally.exchange("attention", "context", "all_gather", keys * c, (1.0, 0.0, 0.0))
        tally.exchange("attention", "context", "reduce_scatter", keys * c, (0.0, 1.0, 0.0))
    else:
        hop = collective_seconds(job.cluster, "send", keys, *span(job, "context"))
        hops = (c - 1, 2 * c - 1, 0.0)
        seconds = (hop * hops[0], hop * hops[1], 0.0)
        tally.entries.append(Entry("context send", "attention", "context", seconds, launches=(0.0, 0.0, 0.0)))


def attention(tally: Tally) -> None:
    """Norm, attention and its sum with the stream."""
    job = tally.job
    m, t, rows, width = job.model, job.layout.tensor, job.rows, job.width
    _norm(tally, pieces(job))
    _enter(tally, "attention")
    entered = entered_bytes(job)
    if m.attention == "latent":
        heads, kv_heads, head_dim, v_dim = m.heads / t, m.heads / t, m.head_dim, m.v_dim
        if m.q_rank:
            tally.product("q_down", "attention", rows, m.q_rank, m.hidden, saved=entered)
            _norm(tally, rows, m.q_rank)
        tally.product("q_up", "attention", rows, heads * head_dim, m.q_rank or m.hidden)
        tally.product("kv_down", "attention", rows, m.kv_rank + m.rope_dim, m.hidden, saved=0.0)
        _norm(tally, rows, m.kv_rank)
        tally.product("kv_up", "attention", rows, heads * (m.nope_dim + v_dim), m.kv_rank)
    else:
        heads, head_dim, v_dim = m.heads / t, m.head_dim, m.head_dim
        kv_heads = _at_least_one(m.kv_heads / t)
        tally.product("qkv", "attention", rows, (heads + 2 * kv_heads) * head_dim, m.hidden, saved=entered)
    turned = rows * (heads + kv_heads) * head_dim * width
    if m.position == "rotary":
        moved = turned / width * job.stack.rotary_bytes
        tally.stream("rotary", "attention", moved, moved)
    elif job.stack.kernels != "compiled":  # heads are laid out anew for the kernels
        tally.stream("heads apart", "attention", 2 * turned, 2 * turned)
    _context_traffic(tally, heads, kv_heads, head_dim, v_dim)
    _attention_core(tally, heads, kv_heads, head_dim, v_dim)
    tally.product("out", "attention", rows, m.hidden, heads * v_dim)
    _leave(tally, "attention")
    _residual(tally, "attention")


def _at_least_one(heads: Number) -> Number:
    """Key/value heads of a rank: fewer heads than ranks are copied."""
    return heads if isinstance(heads, float | int) and heads >= 1 else (heads < 1) * (1 - heads) + heads


def _activation(tally: Tally, part: str, numbers: Number, *, saved: bool = True) -> None:
    """The function between the matrices of a feed-forward layer, gated or not."""
    job = tally.job
    eager = job.stack.kernels == "eager"
    size = numbers * job.width
    if job.model.gated:
        kept = (3 if eager else 2) * size * saved
        tally.stream("activation", part, (5 if eager else 3) * size, (8 if eager else 5) * size, saved=kept)
    else:
        tally.stream("activation", part, 2 * size, 3 * size, saved=size * saved)


def feed_forward(tally: Tally, width: int, part: str = "ffn") -> None:
    """Norm, a dense feed-forward layer, and its sum with the stream."""
    _ffn_norm(tally)
    _enter(tally, part)
    _dense(tally, width, part, ends=True)
    _leave(tally, part, ends=True)
    _residual(tally, part, ends=True)


def _dense(tally: Tally, width: int, part: str, *, ends: bool = False) -> None:
    job = tally.job
    own = width / job.layout.tensor
    columns = own * (2 if job.model.gated else 1)
    tally.product("up", part, job.rows, columns, job.model.hidden, saved=_ffn_input_bytes(job))
    _activation(tally, part, job.rows * own)
    tally.product("down", part, job.rows, job.model.hidden, own, ends=ends)


def _sent_once(job: Job) -> Number:
    """Share of the rows that travel when a token is sent to a machine once, however many of its experts stand there."""
    if not job.stack.expert_once:
        return 1.0
    size, stride = span(job, "expert")
    machines = job.cluster.spans(size, stride)
    k = job.model.experts_per_token
    share = machines * (1.0 - (1.0 - 1.0 / machines) ** k) / k
    return np.where(machines > 1, share, 1.0)


def mixture(tally: Tally) -> None:
    """Norm, router, experts over ranks and shared ones, and the sum with the stream."""
    job = tally.job
    m, lay, width = job.model, job.layout, job.width
    _ffn_norm(tally)
    tokens = job.rows / lay.tensor if not lay.expert_tensor else job.rows
    if job.stack.sequence_parallel:
        routed = tokens
    else:
        routed = job.rows / lay.tensor
    tally.product("router", "router", routed, m.experts, m.hidden, wide=True, saved=0.0)
    tally.stream("choose", "router", routed * m.experts * 16, routed * m.experts * 16, launches=(6.0, 4.0))
    rows = routed * m.experts_per_token * job.imbalance
    moved = rows * m.hidden * width
    tally.stream("to experts", "experts", 2 * moved, 2 * moved, launches=(2.0, 2.0))
    tally.exchange("experts", "expert", "all_to_all", moved * _sent_once(job), (2.0, 2.0, 0.0))
    own_width = m.expert_ffn / lay.tensor if lay.expert_tensor else m.expert_ffn
    held = m.experts / lay.expert
    tally.grouped("expert up", rows, 2 * own_width, m.hidden, held)
    _activation(tally, "experts", rows * own_width)
    tally.grouped("expert down", rows, m.hidden, own_width, held)
    tally.stream("from experts", "experts", 2 * moved, 2 * moved, saved=moved, launches=(2.0, 2.0))
    if m.shared_experts:
        _enter(tally, "ffn")
        _dense(tally, m.expert_ffn * m.shared_experts, "ffn")
        _leave(tally, "ffn")
    _residual(tally, "experts", ends=True)


def layer(job: Job, *, routed: bool) -> Tally:
    """One decoder layer, with experts or dense."""
    tally = Tally(job)
    attention(tally)
    if routed:
        mixture(tally)
    else:
        feed_forward(tally, job.model.ffn)
    return tally


def embedding(job: Job) -> Tally:
    """Looking tokens up, and handing each rank its piece of the sequence."""
    tally = Tally(job)
    size = pieces(job) * job.model.hidden * job.width
    mask = pieces(job) * job.model.hidden if job.stack.dropout else 0.0
    tally.stream("embedding", "embedding", 2 * size + 3 * mask, 4 * size + 3 * mask, saved=mask)
    operation: Operation = "reduce_scatter" if job.stack.sequence_parallel else "all_reduce"
    tally.exchange("embedding", "tensor", operation, job.rows * job.model.hidden * job.width, (1.0, 0.0, 0.0))
    return tally


def head(job: Job) -> Tally:
    """Last norm, logits and loss."""
    tally = Tally(job)
    m = job.model
    columns = m.vocab / job.layout.tensor
    _norm(tally, pieces(job))
    _enter(tally, "head")
    chunked = chunked_share(job)
    begun = len(tally.entries)
    tally.product("head", "head", job.rows, columns, m.hidden, wide=True, saved=entered_bytes(job))
    moved = job.rows * columns * (chunked * CHUNKED_BYTES + (1.0 - chunked) * job.stack.loss_bytes)
    tally.stream("loss", "loss", 0.45 * moved, 0.55 * moved, launches=(6.0, 4.0))
    if np.any(chunked):
        tally.entries[begun:] = [_at_once(entry, chunked) for entry in tally.entries[begun:]]
    tally.exchange("loss", "tensor", "all_reduce", job.rows * 4.0, (3.0, 0.0, 0.0))
    return tally


CHUNKED_BYTES = 6.0
"""Moved for each 16-bit score of a chunked loss besides its products: read for the sum, read and written as a gradient."""


def chunked_share(job: Job) -> Number:
    """1 where the loss is made of some tokens at a time, 0 where it is not; it is not with tensor ranks."""
    return job.stack.chunked_loss * (np.asarray(job.layout.tensor) == 1)


def _at_once(entry: Entry, share: Number) -> Entry:
    """An operation whose backward pass is done in the forward pass, in so many of the layouts."""

    def moved(passes: tuple[Number, Number, Number]) -> tuple[Number, Number, Number]:
        forward, to_input, to_weight = passes
        return forward + share * (to_input + to_weight), (1 - share) * to_input, (1 - share) * to_weight

    return replace(entry, seconds=moved(entry.seconds), flops=moved(entry.flops), bytes=moved(entry.bytes))
