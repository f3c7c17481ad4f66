"""Which tensors of a layer are kept for the backward pass, and which are recomputed there: Checkmate's question (Jain et al. 2020),
for one layer's small graph.

Every tensor that a layer's backward pass reads is either kept, or dropped and recomputed once from those before it. Keeping it
costs its bytes; recomputing it costs the seconds of its operation:

    x -> attention norm -> heads -> attended -> middle -> ffn norm -> gate, up -> function -> inner
    '----------------------------------------------^  (the residual stream)

A layer's input is always kept, and the backward pass reads all other tensors too, so each dropped one is recomputed once, from
tensors that are kept or already recomputed: bytes and seconds of a set add up. There are few enough sets of dropped tensors to try
them all; those that no other set beats in both bytes and seconds are the layer's choices. Each layer of a rank takes one of these:
`fewest_seconds` finds the assignment that takes the least time within a budget, exactly, by dynamic programming with a bound from
the Lagrangian relaxation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.plan.cost.host import link_of
from shardwise.plan.cost.job import GIB, Job, Number
from shardwise.plan.cost.operations import layer, quantized, residual_bytes
from shardwise.plan.cost.ops import FORWARD, OpList
from shardwise.run import ModelConfig
from shardwise.run.saved_tensors import ELSEWHERE, swappable_tensors

SAVED = ("attention_norm", "heads", "attended", "middle", "ffn_norm", "gate", "up", "function", "inner")
"""Tensors of a layer that can be rematerialized, in their order."""
ROUNDS = 90
"""Halvings of the interval that the Lagrangian's multiplier is searched in."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a layer: its bytes, the seconds of the operations that make it, and their indices in the layer's list of
    operations, each with the share of that operation that makes this tensor."""

    size: float
    seconds: float
    made_by: tuple[tuple[int, float], ...]


class Choice(NamedTuple):
    """One way to treat the tensors of a layer: the bytes it frees, the seconds it costs, and which tensors are dropped, or
    offloaded where `ELSEWHERE` is before their name."""

    spared: float
    seconds: float
    dropped: frozenset[str]

    def cost(self, price: float) -> float:
        """Seconds, minus the freed bytes at `price` seconds each."""
        return self.seconds - price * self.spared


def graph(job: Job, *, routed: bool) -> dict[str, Tensor]:
    """The tensors of a layer that can be rematerialized, by name. With tensor or context parallelism, only those that need no other
    rank; in an MoE layer, those before its experts."""
    m, lay, ops = job.model, job.layout, layer(job, routed=routed)
    places: dict[str, list[int]] = {}
    for place, op in enumerate(ops):
        places.setdefault(op.name, []).append(place)
    found: dict[str, Tensor] = {}

    def add(word: str, size: float, *made_by: tuple[int, float]) -> None:
        seconds = sum(float(ops[place].seconds[FORWARD]) * share for place, share in made_by)
        found[word] = Tensor(float(size), seconds, made_by)

    alone = lay.tensor == lay.context == 1
    stream, width = residual_bytes(job), job.rows * job.width
    norms = [place for place in places["norm"] if ops[place].saved == ops[places["norm"][0]].saved]
    add("attention_norm", stream, (places["norm"][0], 1.0))
    # ALiBi's heads are wider than values, so that attention saves copies, which nothing here can stand for.
    plain = m.attention != "latent" and m.position != "alibi" and not m.qk_norm
    if alone and plain and not 0 < m.sliding_window < job.seq_len:
        rotated = [(place, 1.0) for name in ("rotary", "alibi", "heads apart") for place in places.get(name, ())]
        core = [(place, 1.0) for place, op in enumerate(ops) if op.core]
        add("heads", width * _heads(m, m.heads, m.kv_heads), (places["qkv"][0], 1.0), *rotated)
        add("attended", width * m.heads * m.head_dim, *core)
        if not m.parallel_block:
            add("middle", stream, (places["out"][0], 1.0), (places["residual"][0], 1.0))
    if routed:
        return found
    if not m.parallel_block:
        add("ffn_norm", stream, (norms[-1], 1.0))
    inner, up, function = width * m.ffn / lay.tensor, places["up"][0], places["activation"][0]
    if m.gated:
        if alone:
            add("gate", inner, (up, 0.5))
            add("up", inner, (up, 0.5))
        add("function", inner, (function, 0.4))
        add("inner", inner, (function, 0.6))
    elif m.activation in ("gelu", "gelu_erf"):
        if alone:
            add("up", inner, (up, 1.0))
        add("inner", inner, (function, 1.0))
    return found


def _heads(m: ModelConfig, queries: float, keys: float) -> float:
    """Elements of a token's queries, keys and values, for this many heads."""
    return (queries + keys) * m.key_dim + keys * m.head_dim


def leaving(job: Job, *, routed: bool) -> dict[str, float]:
    """Bytes of the tensors of a layer that are offloaded where all that may be are. They include those that only several ranks
    together could recompute, since an offloaded tensor comes back unchanged."""
    m, lay = job.model, job.layout
    stream, width, inner = residual_bytes(job), job.rows * job.width, job.rows * job.width * m.ffn / lay.tensor
    heads = m.heads / lay.tensor, max(1.0, m.kv_heads / lay.tensor)
    sizes: dict[str, Number] = dict.fromkeys(("attention_norm", "middle", "ffn_norm"), stream)
    sizes |= dict.fromkeys(("gate", "up", "function", "inner"), inner)
    sizes |= {"heads": width * _heads(m, *heads), "attended": width * heads[0] * m.head_dim}
    words = may_leave(m, routed=routed, context=int(lay.context))
    return {word: float(sizes[word]) for word in SAVED if word in words}


def may_leave(model: ModelConfig, *, routed: bool, context: int) -> frozenset[str]:
    """Their names."""
    return swappable_tensors(quantized(model, routed=routed), attention=model.attention, context=context)


Choices = tuple[Choice, ...]


class Window(NamedTuple):
    """How a layer's saved tensors leave the device and come back: bytes a second each way, and the seconds of the layer's passes
    that can hide the transfers."""

    to_host: float
    to_device: float
    forward: float
    backward: float

    def exposed(self, size: Number) -> tuple[Number, Number]:
        """Seconds that a layer waits for this many bytes to leave the device, and to come back."""
        leaving, coming = size / self.to_host - self.forward, size / self.to_device - self.backward
        return np.maximum(leaving, 0.0), np.maximum(coming, 0.0)


def window(job: Job, ops: OpList) -> Window:
    """The window of a layer; transfers to a disk are not hidden."""
    link = link_of(job)
    if job.memory.activations == "disk":
        return Window(link.disk * 1e9, link.disk * 1e9, 0.0, 0.0)
    forward, *backward = (sum(float(op.seconds[which]) for op in ops) for which in range(3))
    return Window(link.to_host * 1e9, link.to_device * 1e9, forward, sum(backward))


def layer_choices(job: Job, tensors: dict[str, Tensor], ops: OpList) -> Choices:
    """The choices for the tensors of the layer that runs these ops."""
    return choices(tensors, window(job, ops) if job.memory.swaps else None)


def choices(tensors: dict[str, Tensor], hidden: Window | None = None) -> Choices:
    """The choices for a layer's tensors that no other beats in both bytes and seconds, the fastest first: without offloading, that
    drops nothing. With a window they may also be offloaded, which takes the seconds that it can't hide."""
    spared, seconds, moved, codes = (np.zeros(1) for _ in range(4))
    for n, tensor in enumerate(tensors.values()):
        ways = [(0.0, 0.0, 0.0, 0.0), (tensor.size, tensor.seconds, 0.0, 1.0), (tensor.size, 0.0, tensor.size, 2.0)]
        ways = ways[: 3 if hidden else 2]
        spared, seconds, moved, codes = (
            np.concatenate([old + way[k] * (3.0**n if k == 3 else 1.0) for way in ways])
            for k, old in enumerate((spared, seconds, moved, codes))
        )
    if hidden is not None:
        seconds = seconds + sum(hidden.exposed(moved))
    order = np.lexsort((-spared, seconds))
    before = np.maximum.accumulate(np.append(-1.0, spared[order]))[:-1]
    best = order[spared[order] > before]
    return tuple(Choice(float(spared[k]), float(seconds[k]), _words(tensors, int(codes[k]))) for k in best)


def _words(tensors: dict[str, Tensor], code: int) -> frozenset[str]:
    found = set()
    for word in tensors:
        code, way = divmod(code, 3)
        if way:
            found.add(word if way == 1 else f"{ELSEWHERE}{word}")
    return frozenset(found)


@lru_cache(maxsize=256)
def fewest_seconds(layers: tuple[Choices, ...], spare: float) -> list[Choice]:
    """A choice for each layer, so that together they free `spare` bytes in the least time; if they can't, as many as they can."""
    most = sum(max(c.spared for c in each) for each in layers)
    if spare <= 0:
        return [each[0] for each in layers]
    if spare >= most:
        return [max(each, key=lambda c: (c.spared, -c.seconds)) for each in layers]
    prices = _prices(layers, spare)
    best, price = _first(layers, prices, spare), prices[1]
    limit = sum(c.seconds for c in best) * (1 - 1e-9)
    # The least that the layers after each one cost, at this price of a byte, and the most bytes that they free.
    least = np.cumsum([0.0, *(_taken(each, price).cost(price) for each in reversed(layers))])[::-1]
    rest = np.cumsum([0.0, *(max(c.spared for c in each) for each in reversed(layers))])[::-1]
    spared, seconds = np.zeros(1), np.zeros(1)
    ways: list[tuple[np.ndarray, np.ndarray]] = []
    for n, each in enumerate(layers):
        more = (np.array([getattr(c, name) for c in each]) for name in ("spared", "seconds"))
        spared, seconds = (np.add.outer(a, b).ravel() for a, b in zip((spared, seconds), more, strict=True))
        bound = seconds + least[n + 1] + price * (spare - spared)
        useful = np.flatnonzero((spared + rest[n + 1] >= spare) & (np.maximum(bound, seconds) < limit))
        useful = useful[np.lexsort((seconds[useful], -spared[useful]))]
        # A state is useless where another frees at least as many bytes in no more time.
        before = np.minimum.accumulate(np.append(np.inf, seconds[useful]))[:-1]
        useful = useful[seconds[useful] < before]
        spared, seconds = spared[useful], seconds[useful]
        ways.append((useful // len(each), useful % len(each)))
    if not len(seconds):
        return best
    place, found = int(np.argmin(seconds)), []
    for (parents, taken), each in zip(reversed(ways), reversed(layers), strict=True):
        found.append(each[taken[place]])
        place = parents[place]
    return found[::-1]


def _prices(layers: Sequence[Choices], spare: float) -> tuple[float, float]:
    """Two prices of a byte in seconds: at the first, layers that choose alone free just too few bytes; at the second, enough."""
    low, high = 0.0, 1.0
    while sum(_taken(each, high).spared for each in layers) < spare:
        high *= 2.0
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        enough = sum(_taken(each, middle).spared for each in layers) >= spare
        low, high = (low, middle) if enough else (middle, high)
    return low, high


def _taken(each: Choices, price: float) -> Choice:
    return min(each, key=lambda c: c.cost(price))


def _first(layers: Sequence[Choices], prices: tuple[float, float], spare: float) -> list[Choice]:
    """An initial solution: all layers at the higher price, then as many as possible at the lower one, then what slack allows."""
    low, high = prices
    found = [_taken(each, high) for each in layers]
    left = sum(c.spared for c in found) - spare
    for n, each in enumerate(layers):
        less = _taken(each, low)
        if 0 < found[n].spared - less.spared <= left:
            left -= found[n].spared - less.spared
            found[n] = less
    for n, each in enumerate(layers):
        other = min((c for c in each if c.spared >= found[n].spared - left), key=lambda c: c.seconds)
        left += other.spared - found[n].spared
        found[n] = other
    return found


def within_budget(job: Job, ops: OpList, saved: float) -> list[Choice]:
    """The choices for a rank's layers, as if all were like this one, which saves `saved` bytes where all is kept."""
    count = max(1, round(job.rank_layers))
    if job.layout.recompute != "optimal":  # everything that may is offloaded
        away = leaving(job, routed=is_routed(ops))
        size = sum(away.values())
        return [Choice(size, sum(window(job, ops).exposed(size)), frozenset(f"{ELSEWHERE}{word}" for word in away))]
    tensors = graph(job, routed=is_routed(ops))
    each = layer_choices(job, tensors, ops)
    return fewest_seconds((each,) * count, count * saved - job.layout.recompute_budget * GIB)


def exposed_swap(job: Job, ops: OpList, saved: float) -> tuple[float, float]:
    """Mean seconds that a layer waits for its tensors to leave the device, and to come back."""
    away, hidden, taken = leaving(job, routed=is_routed(ops)), window(job, ops), within_budget(job, ops, saved)
    sizes = (sum(size for word, size in away.items() if f"{ELSEWHERE}{word}" in c.dropped) for c in taken)
    there, back = zip(*map(hidden.exposed, sizes), strict=True)
    return float(np.mean(there)), float(np.mean(back))


def is_routed(ops: OpList) -> bool:
    """Whether these are the ops of an MoE layer."""
    return any(op.part == "experts" for op in ops)


def shares(job: Job, ops: OpList, saved: float) -> list[float]:
    """The mean share of each operation of such a layer that is recomputed."""
    found, taken = [0.0] * len(ops), within_budget(job, ops, saved)
    tensors = graph(job, routed=is_routed(ops))
    for choice in taken:
        for word in choice.dropped & set(tensors):
            for place, share in tensors[word].made_by:
                found[place] += share / len(taken)
    return found
