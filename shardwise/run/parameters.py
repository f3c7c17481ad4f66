"""The table of a model's parameters: name, shape, owner, how a layout cuts them, and how they are initialised. No torch.

`model/` initialises parameters from it, `parallel/` shards tensors by it, `plan/` counts parameters, FLOPs, bytes and traffic with
it. It lists the parameters in the order of `Transformer.named_parameters()`; a test checks this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from shardwise.run.config import ModelConfig
from shardwise.run.sections.adapter import NF4_BLOCK, NF4_SCALES, NO_ADAPTER, AdapterConfig
from shardwise.run.sections.layout import LayoutConfig

Owner = Literal["embedding", "attention", "ffn", "router", "experts", "shared_experts", "norm", "head"]
Init = Literal["normal", "residual", "ones", "zeros", "adapter", "magnitude"]


class Cut(NamedTuple):
    """A parameter is cut over the ranks of `axis` along dimension `dim`, in equal shards rounded up to full rows."""

    axis: str
    dim: int


def shard_bounds(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows of `length`, start and stop, that a rank holds: equal shards, rounded up, so that the last ranks may hold fewer."""
    rows = -(-length // ranks)
    return min(rank * rows, length), min((rank + 1) * rows, length)


def shard_length(length: int, ranks: int, rank: int) -> int:
    """The number of rows of `length` that a rank holds."""
    start, stop = shard_bounds(length, ranks, rank)
    return stop - start


HEAD = "head.weight"


@dataclass(frozen=True)
class Parameter:
    """One parameter of the full model."""

    name: str
    """As in the state dict; in a layer, without "layers.N."."""
    shape: tuple[int, ...]
    owner: Owner
    init: Init = "normal"
    """`residual` writes to the residual stream: its standard deviation is divided by sqrt(2 layers). `adapter`: the standard
    deviation of a uniform distribution within 1 / sqrt(columns), as PyTorch initialises a `Linear`. `magnitude`: the norm of each
    row of its matrix."""
    multiplied: bool = False
    """Whether it is the weight of a GEMM. A tied embedding is one too: it is also the head."""
    tensor_dim: int | None = None
    """The dimension that the tensor axis cuts; None: every tensor rank holds the full parameter."""
    kv_heads: int = 0
    """Key/value heads in its rows, 0 for other parameters. With fewer heads than tensor ranks it is not cut: every rank holds the
    full parameter and uses the rows of one head."""
    frozen: bool = False
    """It gets no gradient and has no optimizer state; it is held in the compute dtype."""
    adapted: bool = False
    """Whether it is a matrix that has an adapter."""
    dtype: Literal["", "uint8", "int32"] = ""
    """The storage dtype of a 4-bit matrix and its scales. float32 scales are stored as int32 with the same bits, so that no cast
    changes them."""
    packed: int = 1
    """Weights stored in one of its elements."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def routed(self) -> bool:
        """Whether it stacks the routed experts, which the expert axis distributes along the first dimension."""
        return self.owner == "experts"

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of a `Linear` in a layer; only these may multiply in fp8 and have compute copies."""
        return self.multiplied and self.owner in ("attention", "ffn", "shared_experts")

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of them, inside of a layer; these are the ones Muon updates."""
        return len(self.shape) > 1 and self.owner not in ("embedding", "head")

    def replicated_kv(self, tensor: int) -> bool:
        """Whether there are more tensor ranks than key/value heads."""
        return 0 < self.kv_heads < tensor

    def cuts(self, layout: LayoutConfig) -> tuple[Cut, ...]:
        """How a layout cuts it. If the tensor axis does not cut it, each tensor rank sees only some of the tokens or heads, so its
        gradient is a partial sum that is all-reduced over those ranks at the end of a step."""
        found = (Cut("expert", 0),) if self.routed and layout.expert > 1 else ()
        whole = self.tensor_dim is None or layout.tensor == 1 or self.replicated_kv(layout.tensor)
        if whole or (self.routed and not layout.expert_tensor):
            return found
        assert self.tensor_dim is not None
        return (*found, Cut("tensor", self.tensor_dim))


def layer_parameters(model: ModelConfig, moe: bool, adapter: AdapterConfig = NO_ADAPTER) -> tuple[Parameter, ...]:
    """The parameters of one layer, dense or MoE, with those of its adapters."""
    return _table(model, "moe" if moe else "dense", adapter)


@cache
def _table(model: ModelConfig, where: str, adapter: AdapterConfig) -> tuple[Parameter, ...]:
    if where in ("dense", "moe"):
        entries = _layer(model, where == "moe")
    else:
        entries = _first(model) if where == "first" else _last(model)
    return tuple(_with_adapters(entries, adapter, (HEAD,) if model.scores else ()))


def _layer(model: ModelConfig, moe: bool) -> tuple[Parameter, ...]:
    attention = _latent_attention(model) if model.attention == "latent" else _grouped_attention(model)
    ffn = _moe(model) if moe else _feed_forward(model, "ffn", model.ffn, "ffn")
    ffn_norm = _norm(model, "ffn_norm") if model.has_ffn_norm else ()
    return (*_norm(model, "attention_norm"), *attention, *ffn_norm, *ffn)


def first_parameters(model: ModelConfig, adapter: AdapterConfig = NO_ADAPTER) -> tuple[Parameter, ...]:
    """The parameters before the layers."""
    return _table(model, "first", adapter)


def _first(model: ModelConfig) -> tuple[Parameter, ...]:
    tied = model.tied_embeddings
    found = [Parameter("embed.weight", (model.vocab, model.hidden), "embedding", multiplied=tied, tensor_dim=0)]
    if model.position == "learned":
        found.append(
            Parameter("positions.weight", (model.max_positions + model.position_offset, model.hidden), "embedding")
        )
    if model.embedding_norm:
        found += _norm(model, "embed_norm")
    return tuple(found)


def last_parameters(model: ModelConfig, adapter: AdapterConfig = NO_ADAPTER) -> tuple[Parameter, ...]:
    """The parameters after the layers. A tied head is the embedding."""
    return _table(model, "last", adapter)


def _last(model: ModelConfig) -> tuple[Parameter, ...]:
    dim = None if model.scores else 0
    head = Parameter(HEAD, (model.head_rows, model.hidden), "head", multiplied=True, tensor_dim=dim)
    return (*_norm(model, "norm"), *(() if model.tied_embeddings else (head,)))


def find_parameter(model: ModelConfig, name: str, adapter: AdapterConfig = NO_ADAPTER) -> Parameter:
    """The table entry of the parameter with this full name."""
    if name.startswith("layers."):
        _, layer, name = name.split(".", 2)
        return _index(model, "moe" if model.is_moe(int(layer)) else "dense", adapter)[name]
    return _index(model, "outer", adapter)[name]


@cache
def _index(model: ModelConfig, where: str, adapter: AdapterConfig) -> dict[str, Parameter]:
    outer = (*first_parameters(model, adapter), *last_parameters(model, adapter))
    entries = outer if where == "outer" else layer_parameters(model, where == "moe", adapter)
    return {entry.name: entry for entry in entries}


def _with_adapters(
    entries: Iterable[Parameter], adapter: AdapterConfig, learned: tuple[str, ...] = ()
) -> Iterator[Parameter]:
    """The parameters, frozen except those in `learned`, with the two factors of each adapter after its matrix and bias: A from the
    matrix's columns to the rank, B from the rank to its rows. A cut of the columns cuts A, a cut of the rows cuts B; the other
    factor stays unsharded."""
    scales: list[Parameter] = []
    factors: list[Parameter] = []
    entries = list(entries)
    for entry, following in zip(entries, [*entries[1:], None], strict=True):
        if not adapter.used or entry.name in learned:
            yield entry
            continue
        matrix = entry.name.removesuffix(".weight")
        adapted = (entry.is_linear or entry.routed) and adapter.adapts(matrix)
        frozen = replace(entry, frozen=True, adapted=adapted)
        if adapter.kind == "qlora" and (entry.is_linear or entry.routed):
            scales += _scales(frozen, adapter.double_quantization)
            *rows, columns = entry.shape
            frozen = replace(frozen, shape=(*rows, columns // 2), dtype="uint8", packed=2)
        yield frozen
        if adapted:
            factors += _factors(entry, adapter)
        together = following is not None and (
            following.name == f"{matrix}.bias" if not entry.routed else following.routed
        )
        if not together:
            yield from (*scales, *factors)
            scales, factors = [], []


def scales_of(matrix: str) -> tuple[str, str]:
    """The names of a 4-bit matrix's scales, from its own name: the scales of its blocks, and the scales of those scales."""
    name = f"{matrix.removesuffix('.weight')}." if matrix.endswith(".weight") else f"{matrix}_"
    return f"{name}absmax", f"{name}absmax_scales"


def factors_of(matrix: str) -> tuple[str, str]:
    """The names of an adapter's factors A and B, from its matrix's name."""
    if matrix.endswith(".weight"):
        name = matrix.removesuffix(".weight")
        return f"{name}.lora.A.weight", f"{name}.lora.B.weight"
    stack, _, part = matrix.rpartition(".")
    return f"{stack}.lora.{part}_A", f"{stack}.lora.{part}_B"


def magnitude_of(matrix: str) -> str:
    """The name of the DoRA magnitude of a matrix, from the matrix's name."""
    if matrix.endswith(".weight"):
        return f"{matrix.removesuffix('.weight')}.lora.magnitude"
    stack, _, part = matrix.rpartition(".")
    return f"{stack}.lora.{part}_magnitude"


def matrix_of(magnitude: str) -> str:
    """The name of the matrix that a magnitude belongs to."""
    if magnitude.endswith(".lora.magnitude"):
        return magnitude.replace(".lora.magnitude", ".weight")
    return magnitude.replace(".lora.", ".").removesuffix("_magnitude")


def _scales(entry: Parameter, double: bool) -> Iterator[Parameter]:
    """Scales of a 4-bit matrix (`model/quantized/nf4.py`): one per block. If these are quantized to 8 bits, also the scales of
    their blocks and a mean. Each expert of a stack is its own matrix."""
    *stack, rows, columns = entry.shape
    blocks = (rows, columns // NF4_BLOCK)
    first, second = scales_of(entry.name)
    scale = replace(entry, name=first, shape=(*stack, *blocks), multiplied=False, adapted=False, init="zeros")
    yield replace(scale, dtype="uint8" if double else "int32")
    if double:
        count = -(-prod(blocks) // NF4_SCALES) + 1
        yield replace(scale, name=second, shape=(*stack, count), dtype="int32", tensor_dim=None, kv_heads=0)


def _factors(entry: Parameter, adapter: AdapterConfig) -> Iterator[Parameter]:
    """A and B of a matrix, or of a stack of them, preceded by DoRA's magnitude."""
    *stack, rows, columns = entry.shape
    rank = adapter.rank
    first = len(stack)
    cut = None if entry.tensor_dim is None else entry.tensor_dim - first
    a, b = factors_of(entry.name)
    if adapter.kind == "dora":
        by_rows = first if cut == 0 else None
        shape, heads = (*stack, rows), entry.kv_heads
        yield Parameter(magnitude_of(entry.name), shape, entry.owner, "magnitude", False, by_rows, heads)
    yield Parameter(a, (*stack, rank, columns), entry.owner, "adapter", True, first + 1 if cut == 1 else None)
    yield Parameter(b, (*stack, rows, rank), entry.owner, "zeros", True, first if cut == 0 else None, entry.kv_heads)


def _norm(model: ModelConfig, name: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (model.hidden,), "norm", "ones")
    if model.norm == "layernorm":
        yield Parameter(f"{name}.bias", (model.hidden,), "norm", "zeros")


def _linear(
    name: str, rows: int, columns: int, owner: Owner, *, bias: bool = False, init: Init = "normal", cut: str = "", kv_heads: int = 0
) -> Iterator[Parameter]:  # fmt: skip
    """The matrix of a `Linear` from `columns` to `rows` features, cut along its "rows" or "columns", and its bias."""
    dim = {"rows": 0, "columns": 1}.get(cut)
    yield Parameter(f"{name}.weight", (rows, columns), owner, init, True, dim, kv_heads)
    if bias:
        yield Parameter(f"{name}.bias", (rows,), owner, "zeros", False, 0 if cut == "rows" else None, kv_heads)


def _grouped_attention(m: ModelConfig) -> Iterator[Parameter]:
    q, kv, bias = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.bias != "none"
    yield from _linear("attention.q", q, m.hidden, "attention", bias=bias, cut="rows")
    for name in ("attention.k", "attention.v"):
        yield from _linear(name, kv, m.hidden, "attention", bias=bias, cut="rows", kv_heads=m.kv_heads)
    yield from _linear("attention.out", m.hidden, q, "attention", bias=m.bias == "all", init="residual", cut="columns")
    if m.qk_norm:
        yield Parameter("attention.q_norm.weight", (m.head_dim,), "attention", "ones")
        yield Parameter("attention.k_norm.weight", (m.head_dim,), "attention", "ones")


def _latent_attention(m: ModelConfig) -> Iterator[Parameter]:
    """Down-projections to the latent vectors are small, and every tensor rank holds them in full."""
    if m.q_rank:
        yield from _linear("attention.q_down", m.q_rank, m.hidden, "attention")
        yield Parameter("attention.q_norm.weight", (m.q_rank,), "attention", "ones")
    yield from _linear("attention.q", m.heads * m.head_dim, m.q_rank or m.hidden, "attention", cut="rows")
    yield from _linear("attention.kv_down", m.kv_rank + m.rope_dim, m.hidden, "attention")
    yield Parameter("attention.kv_norm.weight", (m.kv_rank,), "attention", "ones")
    yield from _linear("attention.kv", m.heads * (m.nope_dim + m.v_dim), m.kv_rank, "attention", cut="rows")
    yield from _linear("attention.out", m.hidden, m.heads * m.v_dim, "attention", init="residual", cut="columns")


def _feed_forward(m: ModelConfig, name: str, width: int, owner: Owner) -> Iterator[Parameter]:
    for part in ("gate", "up") if m.gated else ("up",):
        yield from _linear(f"{name}.{part}", width, m.hidden, owner, bias=m.bias == "all", cut="rows")
    yield from _linear(
        f"{name}.down", m.hidden, width, owner, bias=m.bias == "all", init="residual", cut="columns"
    )  # fmt: skip


def _moe(m: ModelConfig) -> Iterator[Parameter]:
    yield Parameter("ffn.router.weight", (m.experts, m.hidden), "router", multiplied=True)
    for part in ("gate", "up"):
        shape = (m.experts, m.expert_ffn, m.hidden)
        yield Parameter(f"ffn.experts.{part}", shape, "experts", multiplied=True, tensor_dim=1)
    shape = (m.experts, m.hidden, m.expert_ffn)
    yield Parameter("ffn.experts.down", shape, "experts", "residual", multiplied=True, tensor_dim=2)
    if m.shared_experts:
        yield from _feed_forward(m, "ffn.shared", m.shared_experts * m.expert_ffn, "shared_experts")
