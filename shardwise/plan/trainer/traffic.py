"""What a rank puts on the wire in one step of this project's trainer: bytes and messages by axis and collective.

Every formula is the one in the heading of the file of `shardwise/parallel` that sends it, with r ranks in a group:

    all_gather       of n bytes a rank       (r-1) n
    reduce_scatter   of N bytes              (r-1)/r N
    all_reduce       of N bytes              2 (r-1)/r N
    all_to_all       of N bytes              (r-1)/r N when dealt out evenly
    send             of n bytes              n

These are the bytes that the definition makes a rank send, whatever algorithm a library uses. They are exact, and held against
a count of the trainer's own messages; but for what the run does not say: how tokens are routed is known only then, and an
even load is assumed, unless the rows moved are given.
Messages are exact too, except for the buckets of DistributedDataParallel, which follow the order in which gradients come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from shardwise.ledger import AXIS_OF as AXIS_OF
from shardwise.ledger import Traffic
from shardwise.plan.trainer.rank import SCALE, Place, Stage, Weight
from shardwise.run import Run

INTEGER = 8
"""Bytes of a token count or an expert's number."""
LOAD = 4
"""Bytes of a number of the routers' load, which stays float32."""
SUM = 8
"""Bytes of the loss, the squared norm, the count of tokens and the wish to stop, which are float64."""
PIECES = 2
"""Messages that overlapped tensor traffic is cut into (`parallel/overlap.py`)."""
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes after which DistributedDataParallel closes a bucket."""

Amount = int | Fraction


@dataclass(frozen=True)
class Sent:
    """Bytes of a rank by one collective of one group in a step, and in how many messages."""

    bytes: Fraction = Fraction(0)
    messages: int = 0


Groups = dict[tuple[str, str], Sent]


@dataclass
class Wire:
    """What a rank sends, added up."""

    place: Place
    sent: Groups

    def _add(self, group: str, operation: str, size: Amount, messages: int) -> None:
        if messages and self.place.sizes[group] > 1:
            before = self.sent.get((group, operation), Sent())
            self.sent[group, operation] = Sent(before.bytes + size, before.messages + messages)

    def all_gather(self, group: str, piece: Amount, times: int = 1, messages: int = 1) -> None:
        """Each rank gives a piece of so many bytes, in all of so many messages."""
        self._add(group, "all_gather", times * (self.place.sizes[group] - 1) * Fraction(piece), times * messages)

    def reduce_scatter(self, group: str, piece: Amount, times: int = 1, messages: int = 1) -> None:
        """Each rank keeps a piece of so many bytes of the sum."""
        self._add(group, "reduce_scatter", times * (self.place.sizes[group] - 1) * Fraction(piece), times * messages)

    def all_reduce(self, group: str, size: Amount, times: int = 1, messages: int = 1, ranks: int = 0) -> None:
        """So many bytes on every rank are added; over all ranks of the group, or some of them."""
        ranks = ranks or self.place.sizes[group]
        self._add(group, "all_reduce", times * Fraction(2 * (ranks - 1), ranks) * size, times * messages)

    def all_to_all(self, group: str, size: Amount, times: int = 1, messages: int = 1) -> None:
        """So many bytes on every rank are dealt out evenly."""
        ranks = self.place.sizes[group]
        self._add(group, "all_to_all", times * Fraction(ranks - 1, ranks) * size, times * messages)

    def send(self, group: str, size: Amount, times: int = 1) -> None:
        """So many bytes to one other rank."""
        self._add(group, "send", Fraction(times) * size, times)

    def moved(self, group: str, size: Amount, messages: int) -> None:
        """An uneven all-to-all, of which so many bytes leave the rank."""
        self._add(group, "all_to_all", Fraction(size), messages)


@dataclass(frozen=True)
class Times:
    """How often the forward and the backward pass of a part run in a step; the forward again where it is repeated."""

    forward: int
    backward: int


def traffic(run: Run, rank: int | None = None, moved: Mapping[int, int] | None = None) -> Traffic:
    """Bytes and messages of a rank in one step; without one, of the rank that sends most.

    `moved` gives, for each mixture layer of the rank, the rows it sends to other expert ranks in the forward passes of a
    step, there and back; without it the load is even.
    """
    if rank is None:
        several = (by_group(run, candidate, moved) for candidate in first_ranks(run))
        return ledger(max(several, key=lambda groups: sum(sent.bytes for sent in groups.values())))
    return ledger(by_group(run, rank, moved))


def first_ranks(run: Run) -> range:
    """The first rank of every pipeline rank: shards are dealt out from there, so none of its peers holds more."""
    return range(0, run.layout.world, run.layout.world // run.layout.pipeline)


def ledger(groups: Groups) -> Traffic:
    """The ledger's record, groups named by their axis."""
    size: dict[str, dict[str, float]] = {}
    messages: dict[str, dict[str, float]] = {}
    for (group, operation), sent in groups.items():
        axis = AXIS_OF.get(group, group)
        for record, value in ((size, float(sent.bytes)), (messages, float(sent.messages))):
            kinds = record.setdefault(axis, {})
            kinds[operation] = kinds.get(operation, 0.0) + value
    return Traffic(size, messages)


def by_group(run: Run, rank: int, moved: Mapping[int, int] | None = None) -> Groups:
    """The same by the groups that really talk, to the byte."""
    place = Place(run, rank)
    wire = Wire(place, {})
    data(wire)
    layers(wire, moved)
    ends(wire)
    pipeline(wire)
    uncut_gradients(wire)
    loads(wire)
    if run.train.optimizer == "muon":
        muon(wire)
    # The count of tokens and the wish to stop ahead of the passes, then the squared norm and the loss.
    wire.all_reduce("world", 4 * SUM, messages=2)
    return wire.sent


def data(wire: Wire) -> None:
    """`shard.py`: parameters gathered, gradients scattered, and all-reduced over copies."""
    place = wire.place
    if place.uses_ddp:
        for stage in place.stages:
            numbers = [weight.numbers for weight in _in_order(place, stage)]
            messages = buckets(n * place.wide for n in reversed(numbers))
            wire.all_reduce("replicate", sum(numbers) * place.reduced, messages=messages)
    if not place.shared:
        return
    lay, n = place.run.layout, place.run.accumulation
    whole = lay.zero < 3
    for stage in place.stages:
        for routed in (False, True):
            layers_alike = sum(place.routed(layer) == routed for layer in stage.layers)
            weights = place.layer_weights(routed) if layers_alike else ()
            for group, own in (("zero", False), ("expert_shard", True)):
                held = [weight for weight in weights if weight.routed == own]
                _share(wire, group, held, layers_alike, 1 if whole else 2 * n)
        # Without a pipeline the backward pass follows at once, and what stands outside of the layers stays gathered.
        _share(wire, "zero", place.outer_weights(stage), 1, 1 if whole else n if lay.pipeline == 1 else 2 * n)
        _gathered_in_vain(wire, stage)
    if place.run.train.fp8 == "tensorwise":
        # `narrow.py`: the largest number of every matrix.
        ranks = place.sizes["zero"]
        matrices = sum(count for count, weight in place.weights() if place.uses_fp8_all_gather(weight, ranks))
        wire.all_reduce("zero", matrices * SCALE, messages=1 if matrices else 0)


def _share(wire: Wire, group: str, weights: Sequence[Weight], units: int, gathers: int) -> None:
    """Units alike, each with these weights, gathered so often in a step."""
    place, run = wire.place, wire.place.run
    numbers = sum(weight.shard(place.sizes[group]) for weight in weights)
    if not units or not numbers:
        return
    # Backward passes in two parts leave the gradients whole until the end of a step.
    once = run.layout.zero == 1 or place.splits_backward
    gathered = sum(place.gathered_shard(weight, place.sizes[group]) for weight in weights)
    wire.all_gather(group, gathered, units * gathers)
    wire.reduce_scatter(group, numbers * place.reduced, units * (1 if once else run.accumulation))
    wire.all_reduce("replicate", numbers * place.reduced, units)


def _gathered_in_vain(wire: Wire, stage: Stage) -> None:
    """A layer that `fully_shard` fetches ahead and nobody uses.

    While a layer's backward pass runs, it fetches what was forward just before that layer. Before a stage's first layer that
    is the end of an earlier microbatch, if there was one, and the pass after this one needs it. After the last backward pass
    none does. First and last stages end in what stands outside of the layers, which is gathered still.
    """
    place, lay = wire.place, wire.place.run.layout
    kept = lay.zero < 3 and place.splits_backward
    if stage.first or stage.last or kept or len(stage.layers) < 2 or not place.runs_dry(stage):
        return
    weights = [weight for weight in place.layer_weights(place.routed(stage.layers[-1])) if not weight.routed]
    wire.all_gather("zero", sum(place.gathered_shard(weight, place.sizes["zero"]) for weight in weights))


def _in_order(place: Place, stage: Stage) -> Iterator[Weight]:
    """The parameters of a stage as they are declared."""
    outer = place.outer_weights(stage)
    before = (2 if place.run.model.position == "learned" else 1) if stage.first else 0
    yield from outer[:before]
    for layer in stage.layers:
        yield from place.layer_weights(place.routed(layer))
    yield from outer[before:]


def buckets(sizes: Iterable[int]) -> int:
    """Messages of DistributedDataParallel for gradients of these bytes in the order they come."""
    count, held, limit = 0, 0, FIRST_BUCKET
    for size in sizes:
        held += size
        if held >= limit:
            count, held, limit = count + 1, 0, BUCKET
    return count + (held > 0)


def layers(wire: Wire, moved: Mapping[int, int] | None) -> None:
    """The traffic inside of the layers, forward, backward and repeated. Layers alike are added up together."""
    place = wire.place
    counts: dict[tuple[bool, frozenset[str]], list[int]] = {}
    for layer, again in place.layers():
        counts.setdefault((place.routed(layer), again), []).append(layer)
    for (routed, again), alike in counts.items():
        calls = place.run.accumulation * len(alike)
        once, twice = Times(calls, calls), Times(2 * calls, calls)
        block = twice if "block" in again else once
        core = twice if again & {"block", "attention"} else once
        enter_leave(wire, block, block, overlapped=place.run.model.attention == "grouped")
        context(wire, core, block)
        # A repeated pass ends with the last tensor that the backward pass needs. That is the input of a layer's last
        # matrix, so what follows it is not sent again; overlapped it is, since the product is made while it is sent.
        ffn = twice if again & {"block", "ffn"} else once
        end = ffn if place.run.layout.async_tensor else once
        if not routed:
            enter_leave(wire, block, end)
            continue
        mixture(wire, ffn, once)
        if place.run.model.shared_experts:
            enter_leave(wire, ffn, end)
        if moved is None:
            rows = len(alike) * even_rows(place)
        else:
            rows = Fraction(sum(moved[layer] for layer in alike))
        _exchange_rows(wire, ffn, rows, calls)


def enter_leave(wire: Wire, entering: Times, leaving: Times, overlapped: bool = True) -> None:
    """`tensor.py`: a part's input gathered, its output added and scattered; backward the other way round. `overlapped`
    tells whether the first matrix takes its input piece by piece, where the layout asks for it."""
    place, lay = wire.place, wire.place.run.layout
    piece = place.tokens // lay.tensor * place.run.model.hidden * place.width
    even = place.run.train.seq_len // (lay.context * lay.tensor) % PIECES == 0
    messages = PIECES if lay.async_tensor and even else 1
    wire.all_gather("tensor", piece, entering.forward, messages if overlapped else 1)
    wire.reduce_scatter("tensor", piece, entering.backward)
    wire.reduce_scatter("tensor", piece, leaving.forward, messages)
    wire.all_gather("tensor", piece, leaving.backward, messages)


def context(wire: Wire, core: Times, block: Times) -> None:
    """`context.py`: what attention needs from the other parts of a sequence."""
    place = wire.place
    m, c, t = place.run.model, place.sizes["context"], place.sizes["tensor"]
    heads = m.heads // t
    kv_heads, v_dim = (heads, m.v_dim) if m.attention == "latent" else (max(1, m.kv_heads // t), m.head_dim)
    each = place.tokens * (m.head_dim + v_dim) * place.width
    match place.run.layout.context_method:
        case "ring":
            wire.send("context", kv_heads * each, core.forward * (c - 1))
            # Keys and values once more, and their gradients the full round home.
            wire.send("context", kv_heads * each, core.backward * (c - 1 + c))
        case "gather":
            wire.all_gather("context", kv_heads * each, core.forward)
            wire.reduce_scatter("context", kv_heads * each, core.backward)
        case "ulysses":
            dealt = kv_heads if kv_heads % c == 0 else heads
            queries = place.tokens * heads * m.head_dim * place.width
            outputs = place.tokens * heads * v_dim * place.width
            wire.all_to_all("context", queries + dealt * each, core.forward + core.backward, messages=3)
            # The last thing that attention does: repeated alone, it ends before.
            wire.all_to_all("context", outputs, block.forward + core.backward)


def mixture(wire: Wire, ffn: Times, once: Times) -> None:
    """`expert.py` without the rows that travel: balance statistics, capacity, and experts cut over tensor ranks."""
    place, lay = wire.place, wire.place.run.layout
    m, micro = place.run.model, place.run.train.microbatch
    tokens = place.tokens // lay.tensor
    # Tokens and probabilities of each expert in each sequence.
    wire.all_reduce("sequence", 2 * micro * m.experts * place.wide, ffn.forward, messages=2)
    if m.expert_capacity:
        wire.all_gather("sequence", tokens * m.experts_per_token * INTEGER, ffn.forward)
    if lay.expert_tensor:
        chosen = tokens * m.experts_per_token
        wire.all_gather("tensor", chosen * (place.wide + INTEGER), ffn.forward, messages=2)
        wire.reduce_scatter("tensor", chosen * place.wide, ffn.backward)
        piece = tokens * m.hidden * place.width
        # The sum of the experts' outputs ends the layer, unless shared experts follow.
        leaving = ffn if m.shared_experts else once
        wire.all_gather("tensor", piece, ffn.forward + leaving.backward)
        wire.reduce_scatter("tensor", piece, ffn.backward + leaving.forward)


def kept_rows(place: Place) -> Fraction:
    """Rows a rank has for the experts of one mixture layer in a microbatch, when routers choose all experts alike."""
    m, lay, train = place.run.model, place.run.layout, place.run.train
    each = Fraction(train.seq_len * m.experts_per_token, m.experts)
    if m.expert_capacity:
        each = min(each, Fraction(ceil(m.expert_capacity * train.seq_len * m.experts_per_token / m.experts)))
    # With expert tensor parallelism each tensor rank has the rows of all of them.
    return train.microbatch * m.experts * each / (lay.context * (1 if lay.expert_tensor else lay.tensor))


def even_rows(place: Place) -> Fraction:
    """Rows that a rank sends to others in a step's forward passes of one mixture layer, there and back."""
    e = place.sizes["expert"]
    return place.run.accumulation * 2 * Fraction(e - 1, e) * kept_rows(place)


def _exchange_rows(wire: Wire, ffn: Times, rows: Fraction, calls: int) -> None:
    """`expert.py`: rows to the ranks of their experts and back, and the counts before."""
    place = wire.place
    wire.all_to_all("expert", place.run.model.experts * INTEGER, ffn.forward)
    passes = Fraction(ffn.forward + ffn.backward, calls)
    size = passes * rows * place.run.model.hidden * place.width
    wire.moved("expert", size, 2 * (ffn.forward + ffn.backward))


def ends(wire: Wire) -> None:
    """`tensor.py`: the embedding is scattered forward and gathered backward, the head the other way round; and the loss."""
    place, n = wire.place, wire.place.run.accumulation
    tokens = place.tokens // place.sizes["tensor"]
    numbers = tokens * place.run.model.hidden
    # Rows are looked up in the dtype of the embedding: that of the arithmetic only where gathering has cast it.
    looked_up = place.width if place.shared else place.wide
    for stage in place.stages:
        for here, width in ((stage.first, looked_up), (stage.last, place.width)):
            if here:
                wire.all_gather("tensor", numbers * width, n)
                wire.reduce_scatter("tensor", numbers * width, n)
        if stage.last:
            wire.all_reduce("tensor", 3 * place.tokens * place.wide, n, messages=2)


def pipeline(wire: Wire) -> None:
    """`pipeline.py`: the stream to the next stage and its gradient to the one before, where they stand on other ranks; and
    the sum of a tied embedding's gradients in `gradients.py`."""
    place = wire.place
    m, home = place.run.model, place.placement
    stream = place.tokens // place.sizes["tensor"] * m.hidden * place.width
    for stage in place.stages:
        near = (n for n in (stage.number - 1, stage.number + 1) if 0 <= n < len(home))
        away = sum(home[n] != home[stage.number] for n in near)
        wire.send("pipeline", stream, place.run.accumulation * away)
    if m.tied_embeddings and home[0] != home[-1] and place.index("pipeline") in (home[0], home[-1]):
        vocabulary = next(w for stage in place.stages for w in place.outer_weights(stage) if w.cut == 0)
        wire.all_reduce("pipeline", _own(place, vocabulary) * place.wide, ranks=2)


def _own(place: Place, weight: Weight) -> int:
    """Numbers of a parameter that this rank holds for good."""
    group = "expert_shard" if weight.routed else "zero"
    return weight.own(place.sizes[group], place.index(group))


def uncut_gradients(wire: Wire) -> None:
    """`gradients.py`: what is not cut over the tensor ranks saw only a part of the tokens or heads on each."""
    place = wire.place
    if place.sizes["tensor"] > 1:
        held = sum(count * _own(place, weight) for count, weight in place.weights() if weight.cut is None)
        wire.all_reduce("tensor", held * place.wide)


def loads(wire: Wire) -> None:
    """`train/step.py`: tokens that each expert was given, over the whole batch."""
    place = wire.place
    if place.mixtures:
        for group in ("replicate", "zero", "tensor"):
            wire.all_reduce(group, place.mixtures * place.run.model.experts * LOAD)


def muon(wire: Wire) -> None:
    """`train/optimizer.py`: every matrix inside of the layers brought together, first its shards, then its parts."""
    place = wire.place
    for count, weight in place.weights(outer=False):
        if len(weight.shape) < 2:
            continue
        if place.shared:
            group = "expert_shard" if weight.routed else "zero"
            wire.all_gather(group, weight.shard(place.sizes[group]) * place.wide, count)
        if weight.cut is not None:
            wire.all_gather("tensor", weight.numbers * place.wide, count)
