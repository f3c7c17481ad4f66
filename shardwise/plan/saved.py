"""What a stage of this project's trainer saves in the forward pass of a microbatch for the backward pass, tensor by tensor.

The rule is PyTorch's: an operation keeps those of its inputs and results that its gradient needs, tensors that several
operations keep count once, and a part that is computed again keeps its inputs instead. What the modules of `model/` keep, for
n rows of d numbers; w is the width of the arithmetic, W that of what 16 bits would spoil (w, or 4 bytes):

    linear       its input, gathered over the tensor ranks where it is; and, where parameters are held wider than the
                 arithmetic and `fully_shard` has not cast them as it gathered them, the copy of its weight that was cast.
                 In 8 bits its weight turned, unless it was gathered so; with one scale a tensor the turned 8-bit input in
                 the place of the input; and the scales
    rms norm     fused (CUDA): input and n W. Composed of small operations (CPU): the input and the input divided by its
                 length, both widened, and n W
    layer norm   input, means and deviations: 2 n w
    rotary       cosines and sines, once for all layers
    attention    queries, keys, values, output and the log-sum-exp of each row; where PyTorch has no fused kernel queries,
                 keys, values widened, and the whole matrix of scores; a mask of its own in each layer where there is a window
      ring       the same; its output is copied for the product that follows
      ulysses    the same of a part of the heads over the whole sequence, the order of tokens, and the output dealt back
      gather     keys and values of the whole sequence, in order, and a mask
    gate, up     silu and gelu keep their input, their product with `up` both factors; relu keeps its result
    router       its input widened, or as it is where it multiplies in parts (CUDA, bfloat16); scores, choices, weights
    experts      rows in the order of their experts, what gate and up keep of them, and the results of each token, to be weighed;
                 the order and the way back, or the place of each choice alone where kernels move the rows (CUDA)
    loss         probabilities of the vocabulary, widened; over tensor ranks also which targets are mine. In chunks: the
                 gradients of its input and, widened, of the head's matrix

Between stages: what came from the stage before, and what went to the one after.
Two things a run does not say are assumed: routers choose all experts alike, unless the rows are given; and documents are
not packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from shardwise.plan.place import SCALE, Place, Stage
from shardwise.plan.traffic import INTEGER, kept_rows
from shardwise.run.derive import gathers_eight_bits, multiplies_in_eight_bits

PLACE = 4
"""Bytes of a place in a batch of rows: where an expert's end, where a choice lies."""

Rows = Mapping[int, tuple[int, int]]
"""By mixture layer: rows that a rank has for the experts in a microbatch, and rows that reach the experts it holds."""


@dataclass
class Tape:
    """Tensors of a stage by name, and which of them are kept."""

    place: Place
    sizes: dict[str, int | Fraction] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    products: dict[str, int] = field(default_factory=dict)
    """Inputs of the products whose weights' gradients can be put off, with bytes of the results."""
    again: frozenset[str] = frozenset()
    """Parts of the present layer that the backward pass computes again."""
    prefix: str = ""
    discarding: bool = False

    @property
    def narrow(self) -> bool:
        """Whether the arithmetic has 16 bits."""
        return self.place.width < 4

    @property
    def casts(self) -> bool:
        """Whether weights are cast where they are used."""
        return self.narrow and not self.place.shared

    @property
    def moves_rows(self) -> bool:
        """Whether kernels lay rows in the order of their experts (`model/expert_rows.py`)."""
        return self.place.fused and self.place.width < 8

    @property
    def in_parts(self) -> bool:
        """Whether routers multiply in parts, and experts all at once (`model/router_product.py`, `model/experts.py`)."""
        return self.place.fused and self.place.run.train.dtype == "bfloat16"

    @property
    def overlaps(self) -> bool:
        """Whether products at the edges of a part are made while their input or result travels (`overlap.py`)."""
        return self.place.sizes["tensor"] > 1 and self.place.run.layout.async_tensor

    def make(self, name: str, numbers: int | Fraction, width: int = 0) -> str:
        """A tensor of the present layer, of so many numbers; gives its name."""
        name = f"{self.prefix}{name}"
        self.sizes[name] = numbers * (width or self.place.width)
        return name

    def keep(self, *names: str) -> None:
        """Keep some tensors for the backward pass."""
        if not self.discarding:
            self.kept.update(names)

    def own(self, name: str, numbers: int | Fraction, width: int = 0) -> None:
        """Keep a tensor that nothing else keeps."""
        self.keep(self.make(name, numbers, width))

    @contextlib.contextmanager
    def part(self, kind: str, *inputs: str) -> Iterator[None]:
        """A part that may be computed again: then its inputs are kept, and nothing inside of it."""
        if self.discarding or kind not in self.again:
            yield
            return
        self.keep(*inputs)
        self.discarding = True
        yield
        self.discarding = False

    @property
    def total(self) -> int | Fraction:
        """Bytes of all that is kept."""
        return sum(self.sizes[name] for name in self.kept)


def linear(
    tape: Tape, x: str, name: str, rows: int, columns: int, inner: int, *, edge: bool = False, whole: bool = True
) -> str:
    """A product with a weight of columns x inner numbers, or with that part of it where it is not the `whole`; at the `edge`
    of a part, it may overlap with tensor traffic."""
    place = tape.place
    if tape.prefix and multiplies_in_eight_bits(place.run, columns, inner):
        return _eight_bits(tape, x, name, rows, columns, inner, whole=whole)
    tape.keep(x)
    if tape.prefix and not (edge and tape.overlaps):
        tape.products[x] = tape.products.get(x, 0) + rows * columns * place.width
    if tape.casts:
        tape.own(f"{name} weight", columns * inner)
    return tape.make(name, rows * columns)


def _eight_bits(tape: Tape, x: str, name: str, rows: int, columns: int, inner: int, *, whole: bool) -> str:
    """The same in 8 bits (`model/fp8.py`)."""
    place, by_tensor = tape.place, tape.place.run.train.fp8 == "tensorwise"
    ranks = place.sizes["zero"]
    if by_tensor:
        source = f"{x} turned"
        tape.sizes[source] = rows * inner + SCALE
        result = rows * columns + SCALE
    else:
        source, result = x, rows * columns * place.width
    tape.keep(source)
    tape.products[source] = tape.products.get(source, 0) + result
    if not (place.shared and whole and gathers_eight_bits(place.run, columns, inner, ranks)):
        tape.own(f"{name} weight turned", columns * inner + SCALE * (1 if by_tensor else inner), 1)
    return tape.make(name, rows * columns)


def norm(tape: Tape, x: str, name: str, rows: int, width: int, *, centered: bool = False) -> str:
    """A norm of rows of so many numbers."""
    wide = tape.place.wide
    with tape.part("norm", x):
        if tape.casts:
            tape.own(f"{name} weight", (2 if centered else 1) * width)
        if centered:
            tape.keep(x)
            tape.own(f"{name} statistics", 2 * rows, wide if tape.place.fused else 0)
        else:
            if tape.place.fused or not tape.narrow:
                tape.keep(x)
            else:
                tape.own(f"{name} widened", rows * width, wide)
            tape.own(f"{name} lengths", rows, wide)
            if not tape.place.fused:
                tape.own(f"{name} unit", rows * width, wide)
    return tape.make(name, rows * width)


def gathered(tape: Tape, x: str, name: str) -> str:
    """A piece of the sequence from every tensor rank."""
    place = tape.place
    return x if place.sizes["tensor"] == 1 else tape.make(name, place.tokens * place.run.model.hidden)


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


def block(tape: Tape, x: str, layer: int, rows: Rows | None) -> str:
    """One layer; gives the name of what it adds to the stream."""
    place, m = tape.place, tape.place.run.model
    piece = place.tokens // place.sizes["tensor"]
    centered = m.norm == "layernorm"
    with tape.part("block", x):
        entered = norm(tape, x, "attention norm", piece, m.hidden, centered=centered)
        attention(tape, gathered(tape, entered, "attention input"))
        middle = tape.make("middle", piece * m.hidden)
        entered = norm(tape, middle, "ffn norm", piece, m.hidden, centered=centered)
        if place.routed(layer):
            with tape.part("ffn", entered):
                mixture(tape, entered, rows[layer] if rows else None)
        else:
            whole = gathered(tape, entered, "ffn input")
            with tape.part("ffn", whole):  # gathered before it begins, so not again
                feed_forward(tape, whole, "ffn", m.ffn)
    return tape.make("out", piece * m.hidden)


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
    if tape.place.fused:
        tape.own("random state", 2, INTEGER)
    if masked or 0 < m.sliding_window < keys:
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


def feed_forward(tape: Tape, x: str, name: str, width: int) -> None:
    """Two matrices and the function between them, or three."""
    m, t, tokens = tape.place.run.model, tape.place.sizes["tensor"], tape.place.tokens
    width //= t
    if m.gated:
        gate = linear(tape, x, f"{name} gate", tokens, width, m.hidden, edge=True)
        up = linear(tape, x, f"{name} up", tokens, width, m.hidden)
        function = tape.make(f"{name} function", tokens * width)
        tape.keep(gate, up, function)
    else:
        up = linear(tape, x, f"{name} up", tokens, width, m.hidden, edge=True)
        if m.activation == "gelu":
            tape.keep(up)
        elif m.activation == "relu2":
            tape.own(f"{name} positive", tokens * width)
    inner = tape.make(f"{name} inner", tokens * width)
    linear(tape, inner, f"{name} down", tokens, m.hidden, width, edge=True)


def mixture(tape: Tape, x: str, rows: tuple[int, int] | None) -> None:
    """Router, experts and shared experts."""
    place = tape.place
    m, lay, wide = place.run.model, place.run.layout, place.wide
    tokens = place.tokens // lay.tensor
    router(tape, x, tokens)
    # With expert tensor parallelism each rank has the tokens of all of them.
    tokens *= lay.tensor if lay.expert_tensor else 1
    chosen = tokens * m.experts_per_token
    tape.own("weights", chosen, place.width if tape.narrow and not tape.moves_rows else wide)
    sent, arrived = rows or (kept_rows(place), kept_rows(place))
    if tape.moves_rows:
        if lay.expert == 1:  # as many as there could be: how many an expert's capacity leaves, only the device knows
            sent = arrived = chosen
        experts(tape, sent, arrived)
        tape.own("places", chosen, PLACE)
        tape.own("results", sent * m.hidden)
    else:
        experts(tape, sent, arrived)
        _results(tape, sent, chosen)
    if m.shared_experts:
        feed_forward(tape, gathered(tape, x, "shared input"), "shared", m.shared_experts * m.expert_ffn)


def _results(tape: Tape, sent: int | Fraction, chosen: int) -> None:
    """What came from the experts, as plain operations bring it back."""
    m = tape.place.run.model
    if m.expert_capacity:  # PyTorch keeps what is laid among zeros, of which it needs the shape alone
        tape.own("done", sent * m.hidden)
    else:
        tape.own("way back", chosen, INTEGER)
    tape.own("results", chosen * m.hidden)


def router(tape: Tape, x: str, tokens: int) -> None:
    """Scores, choices and the two losses beside."""
    place, m, wide = tape.place, tape.place.run.model, tape.place.wide
    micro, k = place.run.train.microbatch, m.experts_per_token
    if tape.narrow and not tape.in_parts:
        tape.own("router input", tokens * m.hidden, wide)
        if place.shared:  # gathered in 16 bits, and widened again
            tape.own("router weight", m.experts * m.hidden, wide)
    else:
        tape.keep(x)
    tape.own("router logits", tokens * m.experts, wide)
    tape.own("router scores", tokens * m.experts, wide)
    tape.own("router log sums", tokens, wide)
    tape.own("chosen", tokens * k, INTEGER)
    tape.own("loads", micro * m.experts, wide)
    if m.router == "sigmoid":
        tape.own("score sums", tokens, wide)
    if m.router_normalize:
        tape.own("chosen scores", tokens * k, wide)
        tape.own("chosen sums", tokens, wide)
    if m.expert_capacity:  # decided over the whole sequence, and a part of that
        tape.own("within capacity", micro * place.run.train.seq_len * k, 1)


def experts(tape: Tape, sent: int | Fraction, arrived: int | Fraction) -> None:
    """Rows to the experts and through them."""
    place, m, lay = tape.place, tape.place.run.model, tape.place.run.layout
    if not tape.moves_rows:
        tape.own("expert order", sent, INTEGER)
    if lay.expert > 1:
        tape.own("arrived order", arrived if tape.moves_rows else 2 * arrived, PLACE if tape.moves_rows else INTEGER)
    width = m.expert_ffn // (lay.tensor if lay.expert_tensor else 1)
    # Experts that no other rank holds a part of are not gathered, so not cast by it either.
    alone = place.sizes["expert_shard"] == place.sizes["replicate"] == 1 and not lay.offload
    if tape.casts or (tape.narrow and alone):
        tape.own("expert weights", 3 * m.experts // lay.expert * width * m.hidden)
    if tape.in_parts and m.hidden % 8 == width % 8 == 0:  # one kernel, which reads where each expert's rows end
        tape.own("expert ends", m.experts // lay.expert, PLACE)
    tape.own("expert rows", arrived * m.hidden)
    tape.own("expert gate, up, function and inner", 4 * arrived * width)


@dataclass(frozen=True)
class Saved:
    """Bytes that a stage keeps for one microbatch."""

    whole: int
    """Between its forward and its backward pass."""
    put_off: int
    """Between the two parts of a backward pass that is split: inputs and gradients of products, for the weights."""
    again: int
    """What the layer that is computed again makes more for a moment."""


def saved(place: Place, stage: Stage, rows: Rows | None = None) -> Saved:
    """What a stage saves for the backward pass of one microbatch."""
    run, m, t = place.run, place.run.model, place.sizes["tensor"]
    tape = Tape(place)
    x = tape.make("input", place.tokens // t * m.hidden)
    if not stage.first:
        tape.keep(x)
    elif t > 1:
        tape.own("embedding rows", place.tokens, INTEGER)
        tape.own("embedding known", place.tokens, 1)
    if m.position == "rotary" and stage.layers:
        width = m.rope_dim if m.attention == "latent" else m.head_dim
        tape.own("rotation", 2 * run.train.seq_len // run.layout.context * width, place.wide)
    more: int | Fraction = 0
    for layer, again in repeated(place, stage).items():
        tape.prefix, tape.again = f"{layer} ", again
        if again:
            more = max(more, _made_again(tape, x, layer, rows))
        x = block(tape, x, layer, rows)
        if again & {"block", "attention"} and run.layout.context == 1 and 0 < m.sliding_window < run.train.seq_len:
            tape.sizes["mask"] = run.train.seq_len**2
            tape.keep("mask")
    tape.prefix, tape.again = "", frozenset()
    put_off = sum(tape.sizes[name] + size for name, size in tape.products.items())
    if any(place.routed(layer) for layer in stage.layers):
        tape.own("auxiliary losses", 3, place.wide)
    if stage.last:
        loss(tape, x)
    else:
        tape.keep(x)
    return Saved(round(tape.total), round(put_off), round(more))


def _made_again(tape: Tape, x: str, layer: int, rows: Rows | None) -> int | Fraction:
    """What a layer keeps when nothing is computed again, over what it keeps so."""
    sizes = []
    for again in (frozenset[str](), tape.again):
        alone = replace(tape, sizes={x: 0}, kept=set(), products={}, again=again)
        block(alone, x, layer, rows)
        sizes.append(alone.total)
    return sizes[0] - sizes[1]


def repeated(place: Place, stage: Stage) -> dict[int, frozenset[str]]:
    """The layers of a stage, each with the parts of it that are computed again."""
    lay, found = place.run.layout, dict(place.layers())
    norms = lay.recompute == "operations" and "norm" in lay.recompute_operations
    with_norms = stage.layers[:: lay.recompute_every] if norms else ()
    return {layer: found[layer] | ({"norm"} if layer in with_norms else set()) for layer in stage.layers}


def loss(tape: Tape, x: str) -> None:
    """The end of the network: norm, head and cross-entropy."""
    place, m, t = tape.place, tape.place.run.model, tape.place.sizes["tensor"]
    rows = next(weight.shape[0] for weight in place.outer_weights(place.stages[-1]) if weight.cut == 0)
    entered = norm(tape, x, "norm", place.tokens // t, m.hidden, centered=m.norm == "layernorm")
    if place.chunked:  # its gradients are made at once, those of its input and of the head's matrix
        tape.own("gradient of the head's input", place.tokens * m.hidden)
        tape.own("gradient of the head", rows * m.hidden, place.wide)
        tape.own("loss", 1, place.wide)
        return
    linear(tape, gathered(tape, entered, "head input"), "logits", place.tokens, rows, m.hidden)
    tape.own("probabilities", place.tokens * rows, place.wide)
    tape.own("loss", 2 if t == 1 else 1, place.wide)
    if t > 1:
        tape.own("target rows", place.tokens, INTEGER)
        tape.own("targets mine and counted", 2 * place.tokens, 1)
