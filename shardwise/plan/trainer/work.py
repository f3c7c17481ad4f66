"""Operations of one rank in one step of this project's trainer, by part of the network and pass.

Matrix products with the weights, and attention's two products under the causal mask and the window; a multiply-add is two.
Norms, activations, the embedding's lookup and what the optimizer does number by number are not counted; the products that Muon
makes are (`muon.py`). With T tokens of a microbatch on a context rank, t tensor ranks, widths as in `operations.py`, and pairs of
a query and a key it sees:

    product     2 T x columns/t x inner     forward, again for its input, again for its weights
    attention   2 pairs x heads/t x (width of keys + width of values)     forward, and twice backward, to its inputs
    experts     as products, on the rows of an even load

What several ranks compute alike counts on each of them: keys and values of fewer heads than tensor ranks, the compressions
of latent attention. Without those, and without recomputation, all ranks together do three times the model's forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.ledger import Work
from shardwise.plan.trainer import muon
from shardwise.plan.trainer.rank import Place, piece
from shardwise.plan.trainer.traffic import first_ranks, kept_rows
from shardwise.run import Run
from shardwise.run.derive import uses_fp8_gemm

CONVENTION = (
    "hardware FLOPs: causal attention (backward twice the forward), head in, embedding lookup out, recomputation in, "
    "Muon's products in"
)
BLOCK, ATTENTION, FFN = frozenset({"block"}), frozenset({"block", "attention"}), frozenset({"block", "ffn"})
NEVER: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GemmFlops:
    """Operations of one product, forward, for one microbatch."""

    part: str
    flops: float
    repeated_by: frozenset[str] = NEVER
    """The recomputed parts of a layer that this product is inside of."""
    weights: bool = True
    """Whether it has weights; attention's own products have none, and both halves of their backward pass are inputs'."""


def work(run: Run, rank: int | None = None) -> Work:
    """Operations of a rank in one step; without one, of the rank that has most."""
    if rank is None:
        return max((work(run, candidate) for candidate in first_ranks(run)), key=lambda w: w.total)
    place = Place(run, rank)
    flops: dict[str, dict[str, float]] = {}
    for times, product, again in _products(place):
        passes = flops.setdefault(
            product.part, dict.fromkeys(("forward", "recompute", "backward_input", "backward_weight"), 0.0)
        )
        total = times * run.accumulation * product.flops
        if product.part == "head" and place.chunked:  # its gradients are made in the forward pass
            passes["forward"] += 3 * total
            continue
        passes["forward"] += total
        passes["recompute"] += total if again & product.repeated_by else 0.0
        passes["backward_input"] += total if product.weights else 2 * total
        passes["backward_weight"] += total if product.weights else 0.0
    flops["parameters"] = {"optimizer": muon.flops(place) if run.train.optimizer == "muon" else 0.0}
    return Work(flops, convention=CONVENTION)


def _products(place: Place) -> Iterator[tuple[int, GemmFlops, frozenset[str]]]:
    """Every product of a rank, alike ones together: how many there are, and which parts of their layers are repeated."""
    counts: dict[tuple[bool, frozenset[str]], int] = {}
    for layer, again in place.layers():
        kind = place.routed(layer), again
        counts[kind] = counts.get(kind, 0) + 1
    for (routed, again), times in counts.items():
        for product in layer_products(place, routed):
            yield times, product, again
    if place.stages[-1].last:
        m, lay = place.run.model, place.run.layout
        rows = piece(m.vocab, lay.tensor, place.index("tensor"))
        yield 1, GemmFlops("head", 2.0 * place.tokens * rows * m.hidden), NEVER


def layer_products(place: Place, routed: bool) -> Iterator[GemmFlops]:
    """The products of one layer."""
    m = place.run.model
    yield from _latent(place) if m.attention == "latent" else _grouped(place)
    yield _core(place)
    if routed:
        yield from _mixture(place)
    else:
        yield from _feed_forward(place, m.ffn, BLOCK | FFN)


def _grouped(place: Place) -> Iterator[GemmFlops]:
    m, t = place.run.model, place.run.layout.tensor
    queries, keys = m.heads // t * m.head_dim, max(1, m.kv_heads // t) * m.head_dim
    yield GemmFlops("attention", 2.0 * place.tokens * m.hidden * (2 * queries + 2 * keys), BLOCK)


def _latent(place: Place) -> Iterator[GemmFlops]:
    m, t = place.run.model, place.run.layout.tensor
    heads = m.heads // t
    # The compressions are not cut: every tensor rank makes the whole of them.
    whole = m.hidden * (m.q_rank + m.kv_rank + m.rope_dim)
    cut = (m.q_rank or m.hidden) * heads * m.head_dim + m.kv_rank * heads * (m.nope_dim + m.v_dim)
    yield GemmFlops("attention", 2.0 * place.tokens * (whole + cut + heads * m.v_dim * m.hidden), BLOCK)


def _core(place: Place) -> GemmFlops:
    m, lay, train = place.run.model, place.run.layout, place.run.train
    v_dim = m.v_dim if m.attention == "latent" else m.head_dim
    # Ulysses deals out heads of whole sequences, the others pieces of the sequence with all heads.
    if lay.context_method == "ulysses":
        pairs = pairs_seen(m.sliding_window, train.seq_len, range(train.seq_len)) / lay.context
    else:
        pairs = float(sum(pairs_seen(m.sliding_window, train.seq_len, part) for part in chunks(place)))
    flops = 2.0 * train.microbatch * pairs * (m.heads // lay.tensor) * (m.head_dim + v_dim)
    return GemmFlops("attention", flops, ATTENTION, weights=False)


def chunks(place: Place) -> tuple[range, ...]:
    """The places of a sequence on this rank's context rank: a piece from the front and its mirror image from the back."""
    length, c, rank = place.run.train.seq_len, place.run.layout.context, place.index("context")
    if c == 1:
        return (range(length),)
    size = length // (2 * c)
    return tuple(range(n * size, (n + 1) * size) for n in (rank, 2 * c - 1 - rank))


def pairs_seen(window: int, length: int, queries: range) -> int:
    """Pairs of these queries and the keys they see under the causal mask and the window."""
    window = min(window or length, length)

    def before(query: int) -> int:
        short = min(query, window)
        return short * (short + 1) // 2 + (query - short) * window

    return before(queries.stop) - before(queries.start)


def _feed_forward(place: Place, width: int, inside: frozenset[str]) -> Iterator[GemmFlops]:
    m, lay = place.run.model, place.run.layout
    one = 2.0 * place.tokens * m.hidden * (width // lay.tensor)
    yield GemmFlops("ffn", one * (2 if m.gated else 1), inside)
    # A repeated pass ends before a layer's last product: backward needs what enters it, not what leaves it. A product
    # that is sent while it is made is repeated whole, as is one whose weights' gradient is put off, and one in 8 bits.
    eight = uses_fp8_gemm(place.run, m.hidden, width // lay.tensor)
    whole = (lay.tensor > 1 and lay.async_tensor) or place.splits_backward or eight
    yield GemmFlops("ffn", one, inside if whole else NEVER)


def _mixture(place: Place) -> Iterator[GemmFlops]:
    m, lay = place.run.model, place.run.layout
    inside = BLOCK | FFN
    # A router sees its own piece of the sequence, also where the experts are cut over the tensor ranks.
    yield GemmFlops("router", 2.0 * place.tokens / lay.tensor * m.experts * m.hidden, inside)
    width = m.expert_ffn // (lay.tensor if lay.expert_tensor else 1)
    yield GemmFlops("experts", 6.0 * float(kept_rows(place)) * m.hidden * width, inside)
    if m.shared_experts:
        yield from _feed_forward(place, m.shared_experts * m.expert_ffn, inside)
