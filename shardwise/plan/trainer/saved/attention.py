"""What attention saves: the projections of its heads, and the core by each way of cutting a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.plan.trainer.saved.tape import Tape, linear, norm
from shardwise.plan.trainer.traffic import INTEGER
from shardwise.run.derive import uses_varlen_attention


@dataclass(frozen=True)
class Heads:
    """Heads as attention gets them, and the names of their tensors; `v` may be a part of a wider one."""

    queries: int
    keys: int
    width: int
    v_width: int
    q: str
    k: str
    v: str


def attention(tape: Tape, x: str) -> None:
    """From a whole sequence to the input of its last product."""
    m, t, tokens = tape.place.run.model, tape.place.sizes["tensor"], tape.place.tokens
    heads = _latent(tape, x) if m.attention == "latent" else _grouped(tape, x)
    with tape.part("attention", heads.q, heads.k, heads.v):
        out = core(tape, heads)
    linear(tape, out, "attention out", tokens, m.hidden, m.heads // t * heads.v_width, edge=True)


def _grouped(tape: Tape, x: str) -> Heads:
    m, t, tokens = tape.place.run.model, tape.place.sizes["tensor"], tape.place.tokens
    queries, keys = m.heads // t, max(1, m.kv_heads // t)
    some = m.kv_heads < t
    turned = []
    for name, count in (("q", queries), ("k", keys)):
        made = linear(
            tape, x, name, tokens, count * m.head_dim, m.hidden, edge=name == "q", whole=name == "q" or not some
        )
        if m.qk_norm:
            made = norm(tape, made, f"{name} norm", tokens * count, m.head_dim)
        if m.position == "rotary":
            made = tape.make(f"{name} turned", tokens * count * m.head_dim)
        turned.append(made)
    v = linear(tape, x, "v", tokens, keys * m.head_dim, m.hidden, whole=not some)
    return Heads(queries, keys, m.head_dim, m.head_dim, turned[0], turned[1], v)


def _latent(tape: Tape, x: str) -> Heads:
    m, tokens = tape.place.run.model, tape.place.tokens
    heads = m.heads // tape.place.sizes["tensor"]
    source = x
    if m.q_rank:
        source = linear(tape, x, "q down", tokens, m.q_rank, m.hidden)
        source = norm(tape, source, "q norm", tokens, m.q_rank)
    linear(tape, source, "q up", tokens, heads * m.head_dim, m.q_rank or m.hidden)
    # The latent is a part of what the product gave, and keeps all of it.
    down = linear(tape, x, "kv down", tokens, m.kv_rank + m.rope_dim, m.hidden)
    latent = norm(tape, down, "kv norm", tokens, m.kv_rank)
    kv = linear(tape, latent, "kv", tokens, heads * (m.nope_dim + m.v_dim), m.kv_rank)
    q, k = (tape.make(name, tokens * heads * m.head_dim) for name in "qk")
    return Heads(heads, heads, m.head_dim, m.v_dim, q, k, kv)


def core(tape: Tape, heads: Heads) -> str:
    """Attention itself (`context.py`); gives the name of its output as the last product takes it."""
    place, lay = tape.place, tape.place.run.layout
    c, batch, length = place.sizes["context"], place.run.train.microbatch, place.run.train.seq_len
    flat = tape.make("attended", place.tokens * heads.queries * heads.v_width)
    if c == 1:
        return fused_attention(tape, heads, flat, length, length)
    if lay.context_method == "ring":
        tape.keep(heads.q, heads.k, heads.v)
        out = tape.make("ring out", place.tokens * heads.queries * heads.v_width)
        tape.keep(out)
        tape.own("ring sums", place.tokens * heads.queries)
        return flat if heads.queries > 1 else out
    if lay.context_method == "gather":
        tape.own("order", length, INTEGER)
        both = tape.make("both", batch * length * heads.keys * (heads.width + heads.v_width))
        seen = replace(heads, k=both, v=both)
        return fused_attention(tape, seen, flat, length // c, length, masked=True)
    tape.own("orders", 4 * length, INTEGER)
    keys = (heads.keys if heads.keys % c == 0 else heads.queries) // c
    queries = heads.queries // c
    q = tape.make("dealt q", batch * length * queries * heads.width)
    k = tape.make("dealt k", batch * length * keys * heads.width)
    v = tape.make("dealt v", batch * length * keys * heads.v_width)
    dealt = replace(heads, queries=queries, keys=keys, q=q, k=k, v=v)
    fused_attention(tape, dealt, tape.make("dealt out", batch * length * queries * heads.v_width), length, length)
    return flat


def fused_attention(tape: Tape, heads: Heads, out: str, queries: int, keys: int, *, masked: bool = False) -> str:
    """One call of PyTorch's attention over so many tokens of each row; gives the name of its output."""
    m, batch, wide = tape.place.run.model, tape.place.run.train.microbatch, tape.place.wide
    if _composes(tape, heads):
        _composed_attention(tape, heads, queries, keys)
        return out
    tape.keep(heads.q, heads.k, heads.v, out)
    tape.own("log sums", batch * queries * heads.queries, wide)
    narrow = 0 < m.sliding_window < keys
    bounds = narrow and uses_varlen_attention(tape.place.run, gpu=tape.place.fused)
    if tape.place.fused:
        tape.own("random state", 3 if bounds else 2, INTEGER)
    if bounds:
        tape.own("begins", batch + 1, 4)
    elif masked or narrow:
        tape.own("mask", queries * keys)
    return out


def _composes(tape: Tape, heads: Heads) -> bool:
    """Whether PyTorch has no fused kernel for these heads: on a CPU for values of another width; on a GPU for those in 16
    bits that are no multiple of 8 wide, for groups of queries in float32, and for float64."""
    other = heads.width != heads.v_width
    if not tape.place.fused:
        return other
    if tape.narrow:
        return other and (heads.width % 8 != 0 or heads.v_width % 8 != 0)
    return heads.keys != heads.queries or tape.place.width == 8


def _composed_attention(tape: Tape, heads: Heads, queries: int, keys: int) -> None:
    batch, wide = tape.place.run.train.microbatch, tape.place.wide
    tape.own("scaled q", batch * queries * heads.queries * heads.width, wide)
    tape.own("scaled k", batch * keys * heads.queries * heads.width, wide)
    tape.own("scores", batch * heads.queries * queries * keys, wide)
    if heads.queries > 1 or tape.narrow:
        tape.own("wide v", batch * keys * heads.queries * heads.v_width, wide)
    else:  # the values of one head lie as the product wants them
        tape.keep(heads.v)
