"""The time of an engine step: the GEMMs once for all its tokens, attention separately for prefill and decode, the head and the
sampling; and the time the host needs to launch it.

Costs are those of `cost.py`, times the measured factors of the engine (`curves.py`). A simulated load asks for tens of thousands of
steps, so each part is computed on a grid of eight sizes per doubling, cached, and interpolated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import floor, log2, sqrt

from shardwise.hardware import Cluster, collective_seconds, make_cluster
from shardwise.hardware.efficiency import memory_seconds
from shardwise.hardware.engine_facts import EngineFacts, engine_facts
from shardwise.plan.cost.flops import multiplied
from shardwise.plan.serving.cost import Serving, Shape, layer_cost, weight_gemm_seconds
from shardwise.plan.serving.curves import TOUCH, Curves
from shardwise.plan.serving.engines import FORMATS, OURS, STORED, stored_format
from shardwise.plan.serving.inference import constants_of, fitted_inference
from shardwise.plan.serving.pool import kv_dtype
from shardwise.run import ModelConfig, Run
from shardwise.run.derive import derive_model
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.weights import QUANTIZED
from shardwise.schedules.serving.settings import graph_sizes, is_short, shared_sizes

GRID = 8
"""Sizes per doubling."""
FEW = 512
"""Up to this many tokens a step mostly reads weights, as decode does."""
TILE = 64
"""Queries per tile of attention: fewer take as long."""
COMPUTED = ("read", "matmul", "elementwise", "experts", "grouped")


@dataclass(frozen=True)
class Spent:
    """Seconds of a step: of the host before the device can begin, of the host launching single kernels, of the device; and of those
    the seconds that it computes without pause, which the chip's power limits."""

    before: float
    launch: float
    device: float
    computing: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """The time of steps of one engine with slots for `slots` sequences, by measured facts."""

    serving: Serving
    facts: EngineFacts
    slots: int = 256
    drafts: int = 0
    """Draft tokens per sequence that a step verifies."""
    _kept: dict[tuple[str, float, float], float] = field(default_factory=dict, compare=False)

    @classmethod
    def of_run(cls, run: Run, cluster: Cluster, drafts: int = 0) -> StepTime:
        """The steps of this project's engine on one replica of a run's layout."""
        model, serve, lay = run.model, run.serve, run.layout
        form = stored_format(model, serve.weights, run.train.dtype)
        serving = Serving(
            model, cluster, OURS, form, form, DTYPE_BYTES[kv_dtype(run)], lay.tensor, lay.pipeline, expert=lay.expert,
            expert_tensor=lay.shard * lay.context * lay.tensor // lay.expert,
            windowed=(1.0, model.sliding_window) if model.sliding_window else (0.0, 0),
            head=FORMATS[STORED[serve.head]] if serve.head in QUANTIZED else None,
        )  # fmt: skip
        return cls(serving, engine_facts(cluster.chip), min(serve.max_sequences, serve.max_step_tokens), drafts)

    @property
    def gpu(self) -> bool:
        """Whether a device computes while the host prepares the next step."""
        return self.serving.chip.name != "cpu"

    def of(self, decodes: int, keys: int, chunks: list[tuple[int, int]], sampled: int) -> Spent:
        """A step of `decodes` decoding sequences with `keys` keys in all, and of prompt chunks as (tokens before, new tokens). It
        samples `sampled` tokens."""
        facts, layers = self.facts.profile, self.serving.model.layers
        if not chunks:
            # CUDA graphs are recorded for few sizes; the padding up to the next size is wasted.
            recorded = self._recorded(decodes) if self.gpu else decodes
            size, host = recorded or decodes, decodes * facts.serve_sequence
            device = self._decode(size, keys / size) + self._pick(size) + self._exchange(size)
            if recorded:
                return Spent(facts.serve_step + host, 0.0, device)
            return Spent(facts.serve_mixed + host, layers * facts.serve_layer, device)
        new = sum(count for _, count in chunks)
        each = new / len(chunks)
        tokens = decodes + new
        seen = keys + sum(count * (2 * before + count + 1) // 2 for before, count in chunks)
        size = next((size for size in self._shared if size >= tokens), 0)
        if self.gpu and size and is_short(tokens, seen):
            device = self._decode(size, seen / size) + self._pick(size) + self._exchange(size)
            host = facts.serve_step + (decodes + len(chunks)) * facts.serve_sequence + new * facts.serve_token
            return Spent(host, 0.0, device)
        # A chunk of one token attends as a decoding token does: the last token of a prompt whose pages are cached.
        single = [before for before, count in chunks if count == 1]
        attending, attended = decodes + len(single), keys + sum(single) + len(single)
        chunks = [each for each in chunks if each[1] > 1]
        factor, added = self._curves.prompt(self._shape)
        device = self._whole * self._linear(tokens)
        if chunks:
            # As long as that many prompts of one length with as many pairs of queries and keys.
            equal = sqrt(sum(count * count for _, count in chunks) / len(chunks))
            device += factor * self._prompt(len(chunks), equal) + added * layers * len(chunks)
        computing = device if tokens > FEW else 0.0
        if any(before for before, _ in chunks):
            sizes = [(before, max(count, TILE)) for before, count in chunks]
            behind = sum(2 * before / count * self._prompt(1, count) for before, count in sizes)
            device += self._after(each) * behind
        if attending:
            attention = self._decode(attending, attended / attending) - self._decode(attending, TOUCH)
            device += self._curves.mixed(self._shape) * max(0.0, attention)
        device += self._pick(sampled) + self._exchange(tokens)
        before = facts.serve_mixed + decodes * facts.serve_sequence + new * facts.serve_token
        return Spent(before, layers * facts.serve_layer, device, computing)

    @cached_property
    def _whole(self) -> float:
        """The share of the GEMMs that a prefill step computes: on a GPU the last layer stops after its attention for all tokens
        but those that are sampled."""
        m = self.serving.model
        if not self.gpu or m.attention == "latent" or m.experts:
            return 1.0
        sizes = multiplied(m, False)
        attended = (m.heads + 2 * m.kv_heads) * m.head_dim * m.hidden
        return 1 - (1 - attended / sum(sizes.values())) / m.layers

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted({*graph_sizes(self.slots), *self._shared})

    @cached_property
    def _shared(self) -> list[int]:
        return shared_sizes(self.slots, self.drafts)

    def _recorded(self, decodes: int) -> int:
        return next((size for size in self._sizes if size >= decodes), 0)

    @cached_property
    def _curves(self) -> Curves:
        label = self.serving.weights.label
        return self.facts.profile.once(("curves", label), lambda: curves_of(self.facts, label))

    @cached_property
    def _shape(self) -> tuple[float, ...]:
        """The sizes of a rank's shard of a layer that determine its speed."""
        s, m = self.serving, self.serving.model
        ffn = m.expert_ffn * m.experts_per_token if m.experts else m.ffn
        kv_heads = 1.0 if m.attention == "latent" else max(1.0, m.kv_heads / s.tensor)
        return float(m.hidden), ffn / s.tensor, m.heads / s.tensor, kv_heads, float(m.head_dim)

    def _kept_at(self, kind: str, first: float, second: float, make: Callable[[float], float]) -> float:
        """`make(second)`, interpolated between two sizes of the grid."""
        place = log2(max(second, 1.0)) * GRID
        below = floor(place)
        found = []
        for at in (below, below + 1):
            key = (kind, first, float(at))
            if key not in self._kept:
                self._kept[key] = make(2.0 ** (at / GRID))
            found.append(self._kept[key])
        low, high = 2.0 ** (below / GRID), 2.0 ** ((below + 1) / GRID)
        share = (max(second, 1.0) - low) / (high - low)
        return found[0] + share * (found[1] - found[0])

    def _after(self, each: float) -> float:
        """The factor of the attention of chunks of `each` tokens to those before them."""
        return self._kept_at("after", 0.0, each, partial(self._curves.after, self._shape))

    def _decode(self, sequences: float, keys: float) -> float:
        """All layers of a decode step, one token per sequence."""

        def make(length: float) -> float:
            return self._curves.decode(self._shape, sequences, length) * modelled_decode(
                self.serving, sequences, length
            )

        return self._kept_at("decode", sequences, keys, make)

    def _linear(self, tokens: float) -> float:
        """A prefill step without its attention."""

        def make(size: float) -> float:
            return self._curves.linear(self._shape, size) * _seconds(self.serving, _rows(size), False)

        return self._kept_at("linear", 0.0, tokens, make)

    def _prompt(self, prompts: int, count: float) -> float:
        """Attention of prompts of `count` tokens to themselves, by the cost model."""

        def make(size: float) -> float:
            return _seconds(self.serving, Shape(prompts, size, size, False), True)

        return self._kept_at("attention", prompts, count, make)

    def _pick(self, rows: float) -> float:
        """The head and the sampling."""
        s = self.serving

        def make(size: float) -> float:
            factor = self._curves.pick(s.model.hidden, s.model.vocab / s.tensor, size)
            return factor * modelled_pick(s, s.model.vocab / s.tensor, size)

        return self._kept_at("pick", 0.0, rows, make) if rows else 0.0

    def _exchange(self, tokens: float) -> float:
        """Communication between ranks, by constants fitted to published engines."""
        s = self.serving
        if s.tensor * s.expert * s.pipeline == 1:
            return 0.0

        def make(size: float) -> float:
            constants, total = constants_of(s, fitted_inference()["effects"]), 0.0
            for routed, count in _kinds(s):
                cost = layer_cost(s, Shape(size, 1, 1, True), routed=routed)
                waits = constants["wait"] * s.engine.wait * cost.waits
                total += count * (constants["tensor"] * cost.seconds.get("tensor", 0.0) + waits)
            if s.pipeline > 1:
                hop = collective_seconds(s.cluster, "send", size * s.model.hidden * 2.0, s.pipeline, s.tensor)
                total += (s.pipeline - 1) * (constants["tensor"] * float(hop) + constants["wait"] * s.engine.wait)
            return total

        return self._kept_at("exchange", 0.0, tokens, make)


def curves_of(facts: EngineFacts, weights: str) -> Curves:
    """The measurements relative to the cost model, on the chip where they were taken."""
    chip = replace(facts.chip, profile=None)
    cluster, dtype = make_cluster(chip, 1), "float32" if chip.name == "cpu" else "bfloat16"
    known = {point["weights"] for point in facts.profile.decode}
    if weights not in known:
        weights = dtype if dtype in known else min(known)

    @cache
    def layer(shape: tuple[float, ...]) -> Serving:
        hidden, ffn, heads, kv_heads, head_dim = map(int, shape)
        sizes = ModelConfig(
            layers=1, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=256
        )
        model = derive_model(sizes, 8192)
        form = stored_format(model, weights, dtype)
        return Serving(model, cluster, OURS, form, form, DTYPE_BYTES[dtype])

    def attention(shape: tuple[float, ...], prompts: float, tokens: float) -> float:
        return _seconds(layer(shape), Shape(prompts, tokens, tokens, False), True)

    return Curves(
        facts,
        weights,
        lambda shape, sequences, keys: modelled_decode(layer(shape), sequences, keys),
        lambda shape, tokens: _seconds(layer(shape), _rows(tokens), False),
        attention,
        lambda shape, tokens, before: 2 * before / tokens * attention(shape, 1, tokens),
        lambda hidden, vocab, rows: modelled_pick(layer((hidden, 4 * hidden, 1, 1, hidden)), vocab, rows),
    )


def _kinds(s: Serving) -> list[tuple[bool, int]]:
    """The numbers of layers without and with routed experts."""
    counts = ((False, s.model.layers - s.routed_layers), (True, s.routed_layers))
    return [(routed, count) for routed, count in counts if count]


def _rows(tokens: float) -> Shape:
    """A pass of `tokens` tokens: up to `FEW` as single tokens, more as one prompt."""
    return Shape(tokens, 1, 1, True) if tokens <= FEW else Shape(1, tokens, tokens, False)


def _seconds(s: Serving, shape: Shape, attention: bool) -> float:
    """Attention of all layers, or all their other computation, by the cost model."""
    total = 0.0
    for routed, count in _kinds(s):
        seconds = layer_cost(s, shape, routed=routed).seconds
        total += count * sum(seconds.get(kind, 0.0) for kind in (("attention",) if attention else COMPUTED))
    return total


def modelled_decode(s: Serving, sequences: float, keys: float) -> float:
    """All layers of a decode step, by the cost model."""
    shape = Shape(sequences, 1, keys, True)
    return _seconds(s, shape, False) + _seconds(s, shape, True)


def modelled_pick(s: Serving, vocab: float, rows: float) -> float:
    """The head, and two passes over its logits, by the cost model."""
    head = weight_gemm_seconds(s.chip, rows, vocab, s.model.hidden, s.head_weights)
    return head + 2 * float(memory_seconds(s.chip, rows * vocab * 4.0))
