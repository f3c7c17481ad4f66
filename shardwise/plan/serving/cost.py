"""The cost of a prefill pass and of a decode step, and the memory they need.

Prefill is a forward pass of many tokens and is compute-bound. A decode step is a pass of one token per sequence and is
memory-bound: it reads all weights that the batch touches once, and the KV cache of every sequence. With E experts and k per token,
a batch of B tokens touches E(1 - (1 - k/E)^B) of them. Tensor ranks all-reduce twice per layer, where latency
counts, not bytes.

Costs are summed by kind of work before any fitted constant, so that fitting and predicting use the same account of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from shardwise.hardware import (
    Cluster,
    attention_seconds,
    collective_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    memory_seconds,
)
from shardwise.hardware.chips import ITEM_BYTES, Chip
from shardwise.plan.cost.flops import keys_seen, multiplied, parameters
from shardwise.plan.cost.job import GIB
from shardwise.plan.serving.engines import FORMATS, Engine, Format
from shardwise.run import ModelConfig
from shardwise.run.parameters import layer_parameters


@dataclass(frozen=True)
class Serving:
    """A model on its ranks. The attention is sharded over `tensor` ranks; each of its `replicas` serves a share of the requests;
    the experts are spread over `expert` x `expert_tensor` ranks."""

    model: ModelConfig
    cluster: Cluster
    engine: Engine
    weights: Format
    attention_weights: Format
    cache_bytes: float = 2.0
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    expert: int = 1
    expert_tensor: int = 1
    windowed: tuple[float, int] = (0.0, 0)
    """The share of layers with a sliding window, and the positions in the window."""
    head: Format | None = None
    """The format of the head, where it is given."""

    @property
    def chip(self) -> Chip:
        """The device."""
        return self.cluster.chip

    @property
    def head_weights(self) -> Format:
        """How embedding and head are stored."""
        if self.head is not None:
            return self.head
        return FORMATS["bf16"] if self.engine.bf16_head and self.weights.bytes < 2 else self.weights

    @property
    def routed_layers(self) -> int:
        """Layers with experts."""
        return self.model.layers - self.model.dense_layers if self.model.experts else 0

    @property
    def expert_skew(self) -> float:
        """How unequally popular the experts are: not at all where every token goes to every expert."""
        return self.engine.expert_skew if self.model.experts_per_token < self.model.experts else 0.0


@dataclass
class Cost:
    """Seconds of a pass by kind of work, and the kernels that the host has to launch."""

    seconds: dict[str, float] = field(default_factory=dict)
    kernels: float = 0.0
    waits: float = 0.0
    """The sum of log2(ranks) over all collectives: ranks wait once for each doubling."""

    def add(self, kind: str, seconds: Any, kernels: float = 1.0) -> None:
        """Adds one operation."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + float(seconds)
        self.kernels += kernels

    def merge(self, other: Cost, times: float = 1.0) -> None:
        """Adds the operations of `other`, `times` times."""
        for kind, seconds in other.seconds.items():
            self.seconds[kind] = self.seconds.get(kind, 0.0) + times * seconds
        self.kernels += times * other.kernels
        self.waits += times * other.waits


@dataclass(frozen=True)
class Shape:
    """The size of one pass on one attention replica: queries of `sequences` sequences, each over `keys` keys."""

    sequences: float
    queries: float
    keys: float
    decode: bool

    @property
    def tokens(self) -> float:
        """The rows of every GEMM."""
        return self.sequences * self.queries


def weight_gemm_seconds(chip: Chip, rows: Any, columns: Any, inner: Any, form: Format, count: Any = 1) -> float:
    """Seconds of a GEMM with a stored weight. Where the weight is stored in fewer bits than the compute dtype, fewer bytes are
    read; large GEMMs are as fast as in the compute dtype."""
    dtype = form.dtype(chip)
    stored = form.bytes / form.reach / ITEM_BYTES[dtype]
    if stored >= 1:
        return float(gemm_seconds(chip, rows, columns, inner, dtype, count))
    reading = gemm_seconds(chip, rows, columns * stored, inner, dtype, count)
    large = 4096.0
    computing = gemm_seconds(chip, large, columns, inner, dtype) * count * rows / large
    return float(np.maximum(reading, computing))


def experts_hit(experts: float, per_token: float, tokens: float, skew: float = 0.0) -> float:
    """How many experts a batch touches if each token chooses at random; with `skew` some are chosen more often than others."""
    chances = np.minimum(per_token / experts * popularity(skew), 1.0)
    return float(experts * np.mean(1.0 - (1.0 - chances) ** tokens))


@cache
def popularity(skew: float) -> Any:
    """How often experts are chosen, relative to the mean: lognormal, with `skew` the standard deviation of the logarithm."""
    if not skew:
        return np.ones(1)
    places = np.array([NormalDist().inv_cdf((n + 0.5) / 256) for n in range(256)])
    weights = np.exp(skew * places)
    return weights / weights.mean()


def busiest_share(experts: float, ranks: int, skew: float) -> float:
    """Rows of the busiest of `ranks` ranks, relative to the mean, if each has the same number of experts. A sum of lognormal
    popularities is nearly lognormal (Fenton 1960), and the largest of `ranks` of them is taken at the expected largest of
    as many normal values (Blom)."""
    if ranks <= 1 or not skew:
        return 1.0
    variance = math.log1p(math.expm1(skew**2) / max(1.0, experts / ranks))
    most = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return math.exp(variance**0.5 * most - variance / 2)


def _all_reduce(cost: Cost, s: Serving, size: float, ranks: int) -> None:
    """Adds an all-reduce of partial sums over `ranks` ranks."""
    if ranks <= 1:
        return
    seconds = collective_seconds(s.cluster, "all_reduce", size, ranks)
    if s.engine.one_shot and ranks <= s.cluster.domain:
        # Every rank reads the partial sums of all others over the fast link: one hop, n - 1 times the bytes.
        seconds = min(seconds, 2 * s.cluster.intra_latency + 4e-6 + size * (ranks - 1) / s.cluster.intra)
    cost.add("tensor", seconds)
    cost.waits += float(np.log2(ranks))


def _elementwise(cost: Cost, s: Serving, *sizes: float) -> None:
    """Kernels that only move bytes."""
    for size in sizes:
        cost.add("elementwise", memory_seconds(s.chip, size))


def _scaled_to_4_bits(cost: Cost, s: Serving, form: Format, rows: float, inner: float) -> None:
    """Adds the kernel that quantizes the input of a 4-bit GEMM in blocks."""
    if form.dtype(s.chip) == "fp4":
        _elementwise(cost, s, rows * inner * (2.0 + form.bytes))


def _attention_core(
    cost: Cost, s: Serving, at: Shape, heads: float, kv_heads: float, head_dim: int, v_dim: int
) -> None:
    share, window = s.windowed
    for part, reach in ((1 - share, at.keys), (share, min(at.keys, window))):
        if part:
            cost.add("attention", part * _core_seconds(s, at, reach, heads, kv_heads, head_dim, v_dim), 2 * part)


def _core_seconds(
    s: Serving, at: Shape, keys: float, heads: float, kv_heads: float, head_dim: int, v_dim: int
) -> float:
    dtype = "float16" if s.weights.name == "fp16" else "bfloat16"
    if s.cache_bytes < 2 and "fp8" in s.chip.peak:
        dtype = "fp8"
    shape: dict[str, Any] = dict(batch=at.sequences, heads=heads, queries=at.queries, head_dim=head_dim, v_dim=v_dim)
    shape |= dict(kv_heads=kv_heads, kernel="flash2" if s.engine.attention == "unfused" else s.engine.attention)
    if at.decode:
        return float(attention_seconds(s.chip, **shape, keys=keys, causal=False, dtype=dtype))
    if s.engine.attention == "unfused":
        pairs = at.sequences * heads
        seconds = gemm_seconds(s.chip, at.queries, keys, head_dim, dtype, pairs)
        seconds += gemm_seconds(s.chip, at.queries, v_dim, keys, dtype, pairs)
        return float(seconds + memory_seconds(s.chip, 2 * 2 * pairs * at.queries * keys))
    dtype = "bfloat16" if dtype == "fp8" else dtype  # prefill attends in 16 bits
    seen = 2 * keys_seen(s.model, int(at.queries)) if keys == at.keys else 2.0 * keys
    return float(attention_seconds(s.chip, **shape, keys=min(seen, at.queries), causal=True, dtype=dtype))


def _attention(cost: Cost, s: Serving, at: Shape) -> None:
    m, t, rows, form, chip = s.model, s.tensor, at.tokens, s.attention_weights, s.chip
    kind = "read" if at.decode else "matmul"

    def gemm(columns: float, inner: float, count: float = 1) -> None:
        _scaled_to_4_bits(cost, s, form, rows, inner * count)
        cost.add(kind, weight_gemm_seconds(chip, rows, columns, inner, form, count))

    heads = m.heads / t
    if m.attention == "latent":
        gemm(m.q_rank + m.kv_rank + m.rope_dim, m.hidden)
        gemm(heads * m.head_dim, m.q_rank or m.hidden)
        if at.decode:  # queries are projected into the latent space and values out of it: the cache is read as stored
            gemm(m.kv_rank, m.nope_dim, heads)
            latent = m.kv_rank + m.rope_dim
            shared = latent / (latent + m.kv_rank)  # the values are the keys, read once
            _attention_core(cost, s, at, heads, shared, latent, m.kv_rank)
            gemm(m.v_dim, m.kv_rank, heads)
        else:
            gemm(heads * (m.nope_dim + m.v_dim), m.kv_rank)
            _attention_core(cost, s, at, heads, heads, m.head_dim, m.v_dim)
        gemm(m.hidden, heads * m.v_dim)
        return
    kv_heads = max(1.0, m.kv_heads / t)
    gemm((heads + 2 * kv_heads) * m.head_dim, m.hidden)
    _attention_core(cost, s, at, heads, kv_heads, m.head_dim, m.head_dim)
    gemm(m.hidden, heads * m.head_dim)


def _feed_forward(cost: Cost, s: Serving, rows: float, width: float, kind: str) -> None:
    """Adds a dense feed-forward layer with `width` columns on this rank."""
    columns = width * (2 if s.model.gated else 1)
    _scaled_to_4_bits(cost, s, s.weights, rows, s.model.hidden)
    cost.add(kind, weight_gemm_seconds(s.chip, rows, columns, s.model.hidden, s.weights))
    _elementwise(cost, s, rows * (columns + width) * 2)
    _scaled_to_4_bits(cost, s, s.weights, rows, width)
    cost.add(kind, weight_gemm_seconds(s.chip, rows, s.model.hidden, width, s.weights))


def _experts(cost: Cost, s: Serving, at: Shape) -> None:
    """Adds the router and the routed experts, which receive the tokens of all replicas."""
    m, chip = s.model, s.chip
    tokens = at.tokens * s.replicas
    skew = s.expert_skew
    rows = tokens * m.experts_per_token / s.expert * busiest_share(m.experts, s.expert, skew)
    held = m.experts / s.expert
    hit = max(1.0, experts_hit(held, m.experts_per_token / s.expert, tokens, skew))
    width = m.expert_ffn / s.expert_tensor
    cost.add("read", weight_gemm_seconds(chip, at.tokens, m.experts, m.hidden, FORMATS["bf16"]))
    _elementwise(cost, s, at.tokens * m.experts * 8, rows * m.hidden * 4, rows * 3 * width * 2, rows * m.hidden * 4)
    dtype = s.weights.dtype(chip)
    for columns, inner in ((2 * width, m.hidden), (m.hidden, width)):
        _scaled_to_4_bits(cost, s, s.weights, rows, inner)
        if s.weights.bytes < ITEM_BYTES[dtype]:
            seconds = weight_gemm_seconds(chip, rows / hit, columns, inner, s.weights, hit)
        else:
            seconds = float(grouped_gemm_seconds(chip, rows, columns, inner, hit, dtype))
        cost.add("experts" if at.decode else "grouped", seconds)
    if s.replicas > 1:  # tokens are sent to their experts and back
        size = at.tokens * min(m.experts_per_token, s.expert) * m.hidden
        for width_of in (min(2.0, s.weights.bytes), 2.0):
            cost.add("tensor", collective_seconds(s.cluster, "all_to_all", size * width_of, s.expert * s.expert_tensor))
            cost.waits += float(np.log2(max(2, s.expert)))


def layer_cost(s: Serving, at: Shape, *, routed: bool) -> Cost:
    """The cost of one layer on one rank."""
    m, cost, kind = s.model, Cost(), "read" if at.decode else "matmul"
    residual = at.tokens * m.hidden * 2.0
    queries = at.tokens * (m.heads / s.tensor) * m.head_dim * 2.0
    _elementwise(cost, s, 4 * residual, 2 * queries)
    if s.engine.attention == "unfused" and not at.decode:  # queries, keys and values are transposed by heads, and back
        _elementwise(cost, s, 4 * queries, 2 * queries)
    _attention(cost, s, at)
    _all_reduce(cost, s, residual, s.tensor)
    _elementwise(cost, s, 4 * residual)
    if routed:
        _experts(cost, s, at)
        if m.shared_experts:
            _feed_forward(cost, s, at.tokens, m.expert_ffn * m.shared_experts / s.tensor, kind)
    else:
        _feed_forward(cost, s, at.tokens, m.ffn / s.tensor, kind)
    _all_reduce(cost, s, residual, s.tensor)
    cost.kernels = max(cost.kernels, s.engine.kernels)
    return cost


def pass_cost(s: Serving, at: Shape) -> Cost:
    """The cost of a whole forward pass, and of sampling one token per sequence."""
    m, cost = s.model, Cost()
    dense = m.layers - s.routed_layers
    if dense:
        cost.merge(layer_cost(s, at, routed=False), dense)
    if s.routed_layers:
        cost.merge(layer_cost(s, at, routed=True), s.routed_layers)
    _elementwise(cost, s, at.tokens * m.hidden * 4.0)
    cost.add("read", weight_gemm_seconds(s.chip, at.sequences, m.vocab / s.tensor, m.hidden, s.head_weights))
    if s.tensor > 1:
        cost.add("tensor", collective_seconds(s.cluster, "all_gather", at.sequences * m.vocab * 4.0, s.tensor))
        cost.waits += float(np.log2(s.tensor))
    _elementwise(cost, s, *(at.sequences * m.vocab * 8.0,) * 3)  # penalties, softmax, sampling
    if s.pipeline > 1:
        hop = collective_seconds(s.cluster, "send", at.tokens * m.hidden * 2.0, s.pipeline, s.tensor)
        cost.add("tensor", (s.pipeline - 1) * hop, s.pipeline - 1)
        cost.waits += s.pipeline - 1
    return cost


def seconds(s: Serving, cost: Cost, constants: Mapping[str, float], *, decode: bool) -> float:
    """Seconds of a pass with the fitted constants. Outside CUDA graphs the host may be slower than the device."""
    device = sum(constants[kind] * value for kind, value in cost.seconds.items())
    device += constants["wait"] * s.engine.wait * cost.waits
    if decode and s.engine.graphs:
        return device + constants["gap"] * cost.kernels
    host = constants["launch"] * s.engine.launch * cost.kernels
    return float((device**4 + host**4) ** 0.25)


def weight_bytes(s: Serving) -> dict[str, float]:
    """Bytes of weights on one rank: attention, dense feed-forward, experts, and embedding with head."""
    m, t = s.model, s.tensor
    attention = [entry for entry in layer_parameters(m, False) if entry.owner == "attention"]
    matrices = sum(entry.numel / (1 if entry.tensor_dim is None else t) for entry in attention if entry.multiplied)
    small = sum(entry.numel for entry in attention if not entry.multiplied)
    ffn = (m.layers - s.routed_layers) * multiplied(m, False)["ffn"] + parameters(m).shared_experts
    tables = m.vocab * m.hidden * (1 if m.tied_embeddings and not s.engine.tables_apart else 2) / t
    if m.position == "learned":
        tables += (m.max_positions + m.position_offset) * m.hidden
    return {
        "attention": m.layers * (matrices * s.attention_weights.bytes + small * 2.0) / s.pipeline,
        "ffn": ffn / t * s.weights.bytes / s.pipeline,
        "experts": parameters(m).experts / (s.expert * s.expert_tensor) * s.weights.bytes / s.pipeline,
        "tables": tables * s.head_weights.bytes / (2 if s.pipeline > 1 else 1),
    }


def cache_bytes(s: Serving, length: float) -> float:
    """Bytes of the KV cache of one sequence on one rank."""
    m = s.model
    if m.attention == "latent":
        numel = float(m.kv_rank + m.rope_dim)
    else:
        numel = 2.0 * max(1.0, m.kv_heads / s.tensor) * m.head_dim
    share, window = s.windowed
    reach = (1 - share) * length + share * min(length, window)
    return m.layers / s.pipeline * numel * reach * s.cache_bytes


def activation_bytes(s: Serving, tokens: float, sequences: float, length: float) -> float:
    """Activation bytes of a pass of `tokens` tokens on a rank."""
    m = s.model
    whole = tokens * m.hidden * 2.0 * s.engine.buffers
    held = whole * (1 + 1 / s.tensor) / 2 + sequences * m.vocab / s.tensor * 4.0  # tensors inside layers are sharded
    if s.engine.attention == "unfused":
        held += 2 * 2.0 * sequences * m.heads / s.tensor * length**2
    return held


def memory_by_owner(s: Serving, sequences: float, input_len: int, output_len: int) -> dict[str, float]:
    """Bytes by owner on a rank that serves `sequences` sequences at a time."""
    together = (
        min(sequences * input_len, s.engine.max_tokens) if s.engine.attention != "unfused" else sequences * input_len
    )
    return {
        "weights": sum(weight_bytes(s).values()),
        "kv_cache": sequences * cache_bytes(s, input_len + output_len),
        "activations": activation_bytes(s, together, sequences, input_len),
        "fixed": s.engine.fixed * GIB,
    }


def capacity(s: Serving, input_len: int, output_len: int) -> float:
    """Sequences that one replica can serve at a time."""
    e = s.engine
    beside = sum(weight_bytes(s).values()) + e.fixed * GIB
    beside += activation_bytes(s, min(e.max_tokens, 4 * input_len), 64, input_len)
    length = input_len + output_len * (1.0 if e.kv_whole else 0.6)
    fits = e.kv_share * (s.chip.memory - beside) / cache_bytes(s, length)
    return float(np.clip(np.floor(fits), 1, e.max_batch))
