"""The tensors that the parts of a layer save for the backward pass: linears and norms, attention with each context-parallel method,
feed-forward layers; experts are in `saved_experts.py`. Shapes of weights come from the table of parameters; the rules are in the
heading of `saved.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.plan.trainer.rank import SCALE
from shardwise.plan.trainer.tape import Tape
from shardwise.run.derive import uses_fp8_all_gather, uses_fp8_gemm, uses_varlen_attention
from shardwise.run.dtypes import INT64


def linear(tape: Tape, x: str, name: str, *, edge: bool = False, added: bool = False, joins: str = "") -> str:
    """The GEMM of a weight with all tokens; returns the name of its output. At the `edge` of a part it may overlap with a tensor
    collective. An output that is `added` into that of a parallel block shares its gradient, unless that gradient is gathered over
    tensor ranks. An adapter `joins` the output of a matrix, and shares its gradient."""
    planned, parameter = tape.planned, tape.parameters[f"{name}.weight"]
    rows, inner, weight = planned.tokens, parameter.shape[1] * parameter.entry.packed, parameter.multiplied_numel
    columns = weight // inner if inner else 0
    out = rows * columns
    if f"{name}.lora.A.weight" in tape.parameters:
        if planned.run.adapter.dropout:  # a mask of one bit an element, and the masked input
            tape.save_new(f"{name} mask", -(-rows * inner // 8), 1)
            x = tape.make(f"{name} dropped", rows * inner)
        rescaled = f"{name}.lora.magnitude" in tape.parameters
        low = linear(tape, x, f"{name}.lora.A")
        linear(tape, low, f"{name}.lora.B", added=added and not rescaled, joins=f"{name} sum" if rescaled else name)
        if rescaled:  # the sum, its factor, and the row norms it is divided by
            tape.save_new(f"{name} sum", out)
            tape.save_new(f"{name} factor", columns)
            tape.save_new(f"{name} lengths", columns, planned.high_width)
    if not parameter.learns:
        return tape.make(name, out)
    if tape.prefix and uses_fp8_gemm(planned.run, columns, inner):
        per_tensor = planned.run.train.fp8 == "tensorwise"
        source, result = x, out * planned.width
        if per_tensor:
            if x != tape.quantized[0]:
                tape.quantized = x, tape.quantized[1] + 1
            source, result = f"{x} transposed {tape.quantized[1]}", out + SCALE
            tape.sizes[source] = rows * inner + SCALE
        tape.save(source)
        tape.defer(source, name, result)
        gathered_in_fp8 = not parameter.replicated_kv and uses_fp8_all_gather(
            planned.run, columns, inner, planned.size("zero")
        )
        if not (planned.is_sharded and gathered_in_fp8):
            tape.save_new(f"{name} weight transposed", weight + SCALE * (1 if per_tensor else inner), 1)
        return tape.make(name, out)
    tape.save(x)
    if tape.prefix and not (edge and tape.overlaps):
        shared = added and planned.run.model.parallel_block and planned.size("tensor") == 1
        tape.defer(x, "out" if shared else joins or name, out * planned.width)
    if planned.casts(parameter) and not (tape.prefix and planned.keeps_compute_copies):
        tape.save_new(f"{name} weight", weight)
    return tape.make(name, out)


def norm(tape: Tape, x: str, name: str, rows: int) -> str:
    """A norm of this many rows; returns the name of its output."""
    high, width = tape.planned.high_width, tape.parameters[f"{name}.weight"].numel
    centered = f"{name}.bias" in tape.parameters
    with tape.part("norm", x):
        if tape.planned.casts(tape.parameters[f"{name}.weight"]):
            tape.save_new(f"{name} weight", (2 if centered else 1) * width)
        if tape.planned.norm_saves_input(centered):
            tape.save(x)
        else:
            tape.save_new(f"{name} input", rows * width, high)
        if centered:
            tape.save_new(f"{name} statistics", 2 * rows, high if tape.planned.fused else 0)
        else:
            tape.save_new(f"{name} lengths", rows, high)
            if not tape.planned.fused and tape.parameters[f"{name}.weight"].learns:
                tape.save_new(f"{name} unit", rows * width, high)
    return tape.make(name, rows * width)


def gathered(tape: Tape, x: str, name: str) -> str:
    """The sequence all-gathered over the tensor ranks."""
    planned = tape.planned
    if planned.size("tensor") == 1:
        return x
    whole = tape.make(name, planned.tokens * planned.run.model.hidden)
    tape.shards[whole] = x
    return whole


@dataclass(frozen=True)
class Heads:
    """The heads that attention receives, and the names of their tensors; `v` may be a slice of a wider tensor."""

    queries: int
    keys: int
    width: int
    v_width: int
    q: str
    k: str
    v: str


def attention(tape: Tape, x: str) -> str:
    """Attention from its gathered input; returns the name of the input of the output projection."""
    heads = _latent(tape, x) if tape.planned.run.model.attention == "latent" else _grouped(tape, x)
    with tape.part("attention", heads.q, heads.k, heads.v):
        out = core(tape, heads)
    linear(tape, out, "attention.out", edge=True, added=True)
    return out


def _grouped(tape: Tape, x: str) -> Heads:
    m, t, tokens = tape.planned.run.model, tape.planned.size("tensor"), tape.planned.tokens
    queries, keys = m.heads // t, max(1, m.kv_heads // t)
    projected = []
    for name, count in (("q", queries), ("k", keys)):
        made = linear(tape, x, f"attention.{name}", edge=name == "q")
        if m.qk_norm:
            made = norm(tape, made, f"attention.{name}_norm", tokens * count)
        if m.position != "learned":
            made = tape.make(f"{name} with position", tokens * count * m.key_dim)
        projected.append(made)
    v = linear(tape, x, "attention.v")
    for head in (*projected, v):
        tape.rematerialized("heads", head, x)
    _widen_gradients(tape, queries, keys)
    return Heads(queries, keys, m.key_dim, m.head_dim, projected[0], projected[1], v)


def _widen_gradients(tape: Tape, queries: int, keys: int) -> None:
    """The deferred gradient of a rank's only head may be a view, which keeps a wider tensor; of several heads it is a copy."""
    run, tokens = tape.planned.run, tape.planned.tokens
    m = run.model
    views = not m.qk_norm and m.position in ("learned", "alibi")  # no op after the projections makes a new one
    # Ring and gather send keys and values as one tensor; Ulysses sends them separately.
    as_one = keys == 1 and tape.planned.size("context") > 1 and run.layout.context_method in ("ring", "gather")
    position = m.key_dim - m.head_dim  # the elements that ALiBi adds to a head
    more = {"q": position if queries == 1 and views else 0, "k": position if keys == 1 and views else 0}
    more["v"] = m.key_dim if as_one and not views else 0
    per_tensor = run.train.fp8 == "tensorwise"  # whose gradients are copies in fp8
    for name, numel in more.items():
        gradient = f"{tape.prefix}gradient of attention.{name}"
        columns = m.head_dim * (queries if name == "q" else keys)
        if gradient in tape.deferred and not (per_tensor and uses_fp8_gemm(run, columns, m.hidden)):
            tape.deferred[gradient] += tokens * numel * tape.planned.width


def _latent(tape: Tape, x: str) -> Heads:
    m, tokens = tape.planned.run.model, tape.planned.tokens
    heads = m.heads // tape.planned.size("tensor")
    source = x
    if m.q_rank:
        source = norm(tape, linear(tape, x, "attention.q_down"), "attention.q_norm", tokens)
    linear(tape, source, "attention.q")
    # The latent is a view of the GEMM's output, and keeps all of it.
    latent = norm(tape, linear(tape, x, "attention.kv_down"), "attention.kv_norm", tokens)
    kv = linear(tape, latent, "attention.kv")
    q, k = (tape.make(name, tokens * heads * m.head_dim) for name in "qk")
    return Heads(heads, heads, m.head_dim, m.v_dim, q, k, kv)


def core(tape: Tape, heads: Heads) -> str:
    """Attention itself (`context.py`); returns the name of its output as the output projection reads it."""
    planned, lay = tape.planned, tape.planned.run.layout
    c, batch, length = planned.size("context"), planned.run.train.microbatch, planned.run.train.seq_len
    flat = tape.make("attended", planned.tokens * heads.queries * heads.v_width)
    if c == 1:
        return fused_attention(tape, heads, flat)
    if lay.context_method in ("ring", "gather"):
        k, v = heads.k, heads.v
        if lay.context_method == "gather":
            k = v = tape.make("both", batch * length * heads.keys * (heads.width + heads.v_width))
        tape.save(heads.q, k, v, flat)
        tape.save_new("blocks sums", planned.tokens * heads.queries, planned.high_width)
        return flat
    keys = (heads.keys if heads.keys % c == 0 else heads.queries) // c
    queries = heads.queries // c
    q = tape.make("dealt q", batch * length * queries * heads.width)
    k = tape.make("dealt k", batch * length * keys * heads.width)
    v = tape.make("dealt v", batch * length * keys * heads.v_width)
    dealt = replace(heads, queries=queries, keys=keys, q=q, k=k, v=v)
    fused_attention(tape, dealt, tape.make("dealt out", batch * length * queries * heads.v_width))
    return flat


def fused_attention(tape: Tape, heads: Heads, out: str) -> str:
    """One call of PyTorch's attention on whole sequences; returns the name of its output."""
    m, train, high = tape.planned.run.model, tape.planned.run.train, tape.planned.high_width
    composed = _composes(tape, heads)
    # The output projection copies composed attention's output of several heads, and saves the copy.
    if not composed or heads.queries == 1:
        tape.rematerialized("attended", out, heads.q, heads.k, heads.v)
    if composed:
        _composed_attention(tape, heads)
        return out
    tape.save(heads.q, heads.k, heads.v, out)
    tape.save_new("log sums", train.microbatch * train.seq_len * heads.queries, high)
    windowed = 0 < m.sliding_window < train.seq_len
    varlen = windowed and uses_varlen_attention(tape.planned.run, gpu=tape.planned.fused)
    if tape.planned.fused:
        tape.save_new("random state", 3 if varlen else 2, INT64)
    if varlen:
        tape.save_new("cu_seqlens", train.microbatch + 1, 4)
    elif windowed:
        tape.save_new("mask", train.seq_len**2)
    return out


def _composes(tape: Tape, heads: Heads) -> bool:
    """Whether PyTorch has no fused kernel for these heads. On a CPU: where values differ in width from keys. On a GPU: in 16 bits
    where they differ and a width is no multiple of 8, in float32 with grouped queries, and in float64."""
    other = heads.width != heads.v_width
    if not tape.planned.fused:
        return other
    if tape.low_precision:
        return other and (heads.width % 8 != 0 or heads.v_width % 8 != 0)
    return heads.keys != heads.queries or tape.planned.width == 8


def _composed_attention(tape: Tape, heads: Heads) -> None:
    batch, length, high = tape.planned.run.train.microbatch, tape.planned.run.train.seq_len, tape.planned.high_width
    tape.save_new("scaled q", batch * length * heads.queries * heads.width, high)
    tape.save_new("scaled k", batch * length * heads.queries * heads.width, high)
    tape.save_new("scores", batch * heads.queries * length**2, high)
    if tape.low_precision or heads.keys != heads.queries or (batch > 1 and heads.queries > 1):
        tape.save_new("scaled v", batch * length * heads.queries * heads.v_width, high)
    else:  # values of one sequence or one head have the GEMM's memory layout; grouped ones are repeated
        tape.save(heads.v)


def feed_forward(tape: Tape, x: str, name: str) -> None:
    """Two matrices, or three if gated, and the activation function between them."""
    m = tape.planned.run.model
    numel = tape.planned.tokens * tape.parameters[f"{name}.up.weight"].shape[0]
    inner = tape.make(f"{name} inner", numel)
    if m.gated:
        gate, up = linear(tape, x, f"{name}.gate", edge=True), linear(tape, x, f"{name}.up")
        tape.rematerialized("gate", gate, x)
        tape.rematerialized("up", up, x)
        function = tape.make(f"{name} function", numel)
        tape.rematerialized("function", function, gate)
        tape.rematerialized("inner", inner, function, up)
        tape.save(gate, up, function)
    else:
        up = linear(tape, x, f"{name}.up", edge=True)
        tape.rematerialized("up", up, x)
        tape.rematerialized("inner", inner, up)
        if m.activation in ("gelu", "gelu_erf"):
            tape.save(up)
        elif m.activation == "relu2":
            positive = tape.make(f"{name} positive", numel)
            tape.save(positive)
            if tape.planned.run.memory.lossless:
                tape.made[inner] = (positive,)
        elif m.activation == "relu":
            tape.save(inner)
    linear(tape, inner, f"{name}.down", edge=True, added=True)
