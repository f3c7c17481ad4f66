"""What a rank sends in one step of this project's trainer: bytes and messages by axis and collective.

Every formula is the one in the heading of the file of `shardwise/parallel` that sends it, with r ranks in a group:

    all_gather       of n bytes a rank       (r-1) n
    reduce_scatter   of N bytes              (r-1)/r N
    all_reduce       of N bytes              2 (r-1)/r N
    all_to_all       of N bytes              (r-1)/r N when dealt out evenly
    send             of n bytes              n

These are the bytes that the definition of a collective makes a rank send, whatever algorithm a library uses. They are exact, and
tests compare them with a count of the trainer's own messages. Only the routing of tokens is unknown before a run: the load is
assumed to be even, unless the moved rows are given. Message counts are exact too, except for the buckets of
DistributedDataParallel, which depend on the order in which gradients become ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from shardwise.ledger import AXIS_OF, Traffic
from shardwise.plan.cost.compression import BUCKET, FIRST_BUCKET, SUM
from shardwise.plan.trainer.compression import exchange
from shardwise.plan.trainer.ends import ends, pipeline, uncut_gradients
from shardwise.plan.trainer.muon import gathered_matrices
from shardwise.plan.trainer.rank import SCALE, PlannedParameter, PlannedRank, Stage, first_ranks, reference_run
from shardwise.plan.trainer.rows import rows_to_experts
from shardwise.plan.trainer.units import outer_units, secondary_bytes, secondary_ranks
from shardwise.plan.trainer.wire import Groups, Times, Wire
from shardwise.run import Run
from shardwise.run.compression import block_bytes, blocks_of
from shardwise.run.derive import forward_passes, uses_fp8_gemm
from shardwise.run.dtypes import INT64
from shardwise.run.parameters import magnitude_of

Moved = tuple[int, int]
"""Rows that a rank sends to other expert ranks in forward passes: its own rows (dispatch), and their rows back (combine)."""
LOAD = 4
"""Bytes of an expert's load, which is always float32."""
FIRST_MATRICES = ("q_down", "q", "k", "v", "kv_down", "gate", "up")
"""Matrices that read the input of an attention or feed-forward part; where there is a `q_down`, `q` does not."""
CHUNKS = 2
"""Messages that a tensor collective is split into where it overlaps with GEMMs (`parallel/overlap.py`)."""


def traffic(run: Run, rank: int | None = None) -> Traffic:
    """Bytes and messages of a rank in one step; without `rank`, of the rank that sends most."""
    if rank is not None:
        return by_axis(by_group(PlannedRank(run, rank)))
    apart: dict[object, PlannedRank] = {}
    for place in (PlannedRank(run, first) for first in first_ranks(run)):
        apart.setdefault(_sends(place), place)
    return by_axis(max(map(by_group, apart.values()), key=lambda groups: sum(sent.bytes for sent in groups.values())))


def _sends(place: PlannedRank) -> tuple[object, ...]:
    """A key that is equal for two pipeline ranks, each represented by its first rank, that send the same: their stages hold the
    same, have the same number of neighbours on other ranks, and the same wasted prefetches of `fully_shard`. BPipe hands over a
    different amount on each rank."""
    home, number = place.placement, place.index("pipeline")
    near = tuple(
        sum(home[n] != number for n in (s.number - 1, s.number + 1) if 0 <= n < len(home)) for s in place.stages
    )
    dry = tuple(s.number in place.dry_stages for s in place.stages) if place.size("zero") > 1 else ()
    return place.kinds, near, dry, number if place.run.layout.schedule == "bpipe" else -1


def by_axis(groups: Groups) -> Traffic:
    """The ledger's record, with groups named by their axis."""
    size: dict[str, dict[str, float]] = {}
    messages: dict[str, dict[str, float]] = {}
    for (group, operation), sent in groups.items():
        axis = AXIS_OF.get(group, group)
        for record, value in ((size, float(sent.bytes)), (messages, float(sent.messages))):
            kinds = record.setdefault(axis, {})
            kinds[operation] = kinds.get(operation, 0.0) + value
    return Traffic(size, messages)


def by_group(place: PlannedRank, moved: Mapping[int, Moved] | None = None) -> Groups:
    """Bytes and messages of a rank in one step by process group, to the byte. `moved` gives, for each MoE layer of the rank, the
    rows it sends to other expert ranks in the forward passes of a step, dispatch and combine; without it the load is even."""
    run, rank, wire = place.run, place.rank, Wire(place, {})
    _passes(wire, moved)
    frozen, own = forward_passes(run)
    for _ in range(frozen):
        _passes(Wire(PlannedRank(reference_run(run), rank), wire.sent, forward_only=True, frozen=True), None)
    for number in range(own):
        plain = replace(run, layout=replace(run.layout, recompute="none", recompute_budget=0.0))
        # With adapters, the first passes run without them: they are the reference.
        adapted = not run.adapter.used or number >= wire.planned.objective.reference
        _passes(Wire(PlannedRank(plain, rank), wire.sent, forward_only=True, adapted=adapted), None)
    for group in ("replicate", "shard", "context", "pipeline") if wire.planned.objective.forward_only else ():
        wire.all_reduce(group, 2 * wire.planned.high_width)  # a sum and a count over the results of these passes
    uncut_gradients(wire)
    exchange(wire)
    loads(wire)
    if run.train.optimizer == "muon":
        gathered_matrices(wire)
    # Before the passes the token count and the stop request; after them the squared norm, the loss and the metrics.
    agreeing = "replica" if run.layout.sync_every > 1 else "world"
    wire.all_reduce(agreeing, (4 + len(wire.planned.objective.metrics)) * SUM, messages=2)
    return wire.sent


def _passes(wire: Wire, moved: Mapping[int, Moved] | None) -> None:
    data(wire)
    layers(wire, moved)
    ends(wire)
    pipeline(wire)


def data(wire: Wire) -> None:
    """`shard.py`: parameters all-gathered, gradients reduce-scattered, and all-reduced over replicas."""
    planned, is_moe = wire.planned, wire.planned.run.model.is_moe
    if planned.run.layout.uses_ddp and not wire.forward_only:
        for stage in planned.stages:
            numels = [parameter.numel for parameter in _in_order(planned, stage) if parameter.learns]
            messages = buckets(n * planned.high_width for n in reversed(numels))
            wire.all_reduce("replicate", sum(numels) * planned.reduce_width, messages=messages)
    if not planned.is_sharded:
        return
    lay, n = planned.run.layout, planned.run.stage_microbatches
    once, both = not lay.gathers_each_pass, n if wire.forward_only else 2 * n
    # Without a pipeline the backward pass follows at once, and parameters outside of the layers stay gathered, but for an embedding
    # that is gathered apart.
    outer = n if lay.pipeline == 1 else both
    if wire.forward_only and not wire.frozen:  # what stays gathered is counted in the step's own passes
        if once:
            return
        outer = 0 if lay.pipeline == 1 else n
    layers = [is_moe(layer) for stage in planned.stages for layer in stage.layers]
    for moe in (False, True):
        if count := layers.count(moe):
            _sharded(wire, planned.layer_parameters(moe), count, 1 if once else both, secondary=True)
    for stage in planned.stages:
        for unit, freed in outer_units(planned, stage):
            _sharded(wire, unit, 1, n if freed else 1 if once else outer)
        if not wire.forward_only:
            _unused_prefetch(wire, stage)
    if planned.run.train.fp8 == "tensorwise":
        # `fp8_all_gather.py`: the amax of every matrix.
        ranks = planned.size("zero")
        matrices = sum(count for count, p in planned.parameters() if planned.uses_fp8_all_gather(p, ranks))
        wire.all_reduce("zero", matrices * SCALE, messages=1 if matrices else 0)


def _sharded(
    wire: Wire, parameters: Sequence[PlannedParameter], units: int, gathers: int, secondary: bool = False
) -> None:
    """`units` identical units of these parameters, each all-gathered `gathers` times in a step; experts form units of their own.
    `secondary`: whether the unit keeps secondary shards, where the layout has these; a pass that finds them gathers from them
    alone."""
    planned, run = wire.planned, wire.planned.run
    # Split backward passes leave the gradients unreduced until the end of a step.
    once = run.layout.zero == 1 or planned.splits_backward
    for group in ("zero", "expert_shard"):
        unit, ranks = [p for p in parameters if p.group == group], planned.size(group)
        if unit:
            learned = sum(p.shard_numel(ranks) for p in unit if p.learns)
            in_rows = not any(p.shard_dim(ranks) for p in unit)
            gradients = learned * planned.reduce_width
            near = 0
            if secondary and not wire.frozen and min(secondary_ranks(planned, p) for p in unit) > 1:
                near = gathers - 1 if wire.forward_only else gathers // 2
                alike = group == "zero" or run.layout.expert == 1
                few = "secondary" if alike else "expert_secondary"
                wire.all_gather(few, secondary_bytes(planned, unit), units * near)
            wire.all_gather(group, gathered_bytes(wire, unit, ranks), units * (gathers - near))
            if gradients and not wire.forward_only:
                times, method = units * (1 if once else run.stage_microbatches), run.layout.compress_shards
                if (
                    planned.exchanges_gradients and in_rows and not planned.splits_backward
                ):  # `in_place.py`: a message for each matrix, and one for all vectors
                    sent = ranks * learned * planned.width
                    vectors = [len(p.shape) == 1 for p in unit if p.learns]
                    wire.all_to_all(group, sent, times, messages=vectors.count(False) + any(vectors))
                elif method == "none":
                    wire.reduce_scatter(group, gradients, times)
                else:  # `compress/sharded.py`
                    blocks = sum(blocks_of(p.shard_numel(ranks), method) for p in unit if p.learns)
                    wire.all_to_all(group, ranks * blocks * block_bytes(method), times)
                if run.layout.sharding_replicas > 1:
                    wire.all_reduce("replicate", gradients, units)


def gathered_bytes(wire: Wire, unit: Sequence[PlannedParameter], ranks: int) -> int:
    """Bytes of a shard of these parameters, which are gathered together."""
    method = wire.planned.run.layout.compress_weights
    if method == "none" or wire.frozen:
        return sum(wire.planned.gathered_shard(p, ranks) for p in unit)
    return sum(blocks_of(p.shard_numel(ranks), method) for p in unit) * block_bytes(method)


def _unused_prefetch(wire: Wire, stage: Stage) -> None:
    """A layer that `fully_shard` prefetches and no pass uses.

    During a layer's backward pass, it prefetches the layer that ran forward just before that one. Before a stage's first layer,
    that is the last layer of an earlier microbatch, if there was one, and the next pass needs it. After the last backward pass no
    pass does.
    """
    planned = wire.planned
    kept = planned.run.layout.zero < 3 and planned.splits_backward
    if planned.prefetched_shard(stage) and not kept and stage.number in planned.dry_stages:
        layer = planned.layer_parameters(planned.run.model.is_moe(stage.layers[-1]))
        unit = [p for p in layer if p.group == "zero"]
        wire.all_gather("zero", gathered_bytes(wire, unit, planned.size("zero")))


def _in_order(planned: PlannedRank, stage: Stage) -> Iterator[PlannedParameter]:
    """The parameters of a stage as the module declares them."""
    first = planned.first_parameters(stage)
    yield from first
    for layer in stage.layers:
        yield from planned.layer_parameters(planned.run.model.is_moe(layer))
    yield from planned.outer_parameters(stage)[len(first) :]


def buckets(sizes: Iterable[int]) -> int:
    """Messages of DistributedDataParallel, one a bucket, for gradients of these sizes in the order they become ready."""
    count, held, limit = 0, 0, FIRST_BUCKET
    for size in sizes:
        held += size
        if held >= limit:
            count, held, limit = count + 1, 0, BUCKET
    return count + (held > 0)


def layers(wire: Wire, moved: Mapping[int, Moved] | None) -> None:
    """The traffic inside of the layers: forward, backward and recomputation. Identical layers are counted together."""
    planned, m = wire.planned, wire.planned.run.model
    counts: dict[tuple[bool, frozenset[str]], list[int]] = {}
    for layer, recomputed in planned.recomputed.items():
        counts.setdefault((m.is_moe(layer), recomputed), []).append(layer)
    for (moe, recomputed), alike in counts.items():
        calls = planned.run.stage_microbatches * len(alike)
        backward = 0 if wire.forward_only else calls
        once, twice = Times(calls, backward), Times(2 * calls, backward)
        block = twice if "block" in recomputed else once
        core = twice if recomputed & {"block", "attention"} else once
        tensor(wire, block, block, overlapped=m.attention == "grouped")
        row_lengths(wire, moe, "attention.out.weight", block)
        if block == once:
            regather_inputs(wire, calls, moe, "attention.")
        context(wire, core, block)
        # Recomputation ends with the last tensor that the backward pass needs: the input of a layer's last matrix. So
        # the collective after it is not repeated, except where it overlaps: there the GEMM runs with its collective.
        ffn = twice if recomputed & {"block", "ffn"} else once
        end = ffn if planned.run.layout.async_tensor else once
        row_lengths(wire, moe, "ffn.shared.down.weight" if moe else "ffn.down.weight", ffn)
        if planned.run.layout.expert_tensor:
            row_lengths(wire, moe, "ffn.experts.down", ffn)
        if not moe:
            tensor(wire, block, end)
            if block == once:
                # Where the part is recomputed, its saved tensor is its gathered input.
                regather_inputs(wire, calls, moe, "ffn.", recomputed=ffn == twice)
            continue
        router(wire, ffn, once)
        if m.shared_experts:
            tensor(wire, Times(0, 0) if planned.run.layout.expert_tensor else ffn, end)
            if ffn == once:
                regather_inputs(wire, calls, moe, "ffn.shared.")
        if moved is None:
            away, back = even_rows(planned)
            rows = len(alike) * away, len(alike) * back
        else:
            rows = sum(moved[layer][0] for layer in alike), sum(moved[layer][1] for layer in alike)
        dispatch(wire, ffn, rows, calls)


def tensor(wire: Wire, entering: Times, leaving: Times, overlapped: bool = True) -> None:
    """`tensor.py`: a part's input is all-gathered, its output reduce-scattered; backward the other way round. `overlapped`:
    whether the first GEMM reads its input chunk by chunk, where the layout asks for it."""
    planned, lay = wire.planned, wire.planned.run.layout
    shard = planned.local_tokens * planned.run.model.hidden * planned.width
    even = planned.run.train.seq_len // (lay.context * lay.tensor) % CHUNKS == 0
    messages = CHUNKS if lay.async_tensor and even else 1
    wire.all_gather("tensor", shard, entering.forward, messages if overlapped else 1)
    wire.reduce_scatter("tensor", shard, entering.backward)
    wire.reduce_scatter("tensor", shard, leaving.forward, messages)
    wire.all_gather("tensor", shard, leaving.backward, messages)


def row_lengths(wire: Wire, moe: bool, name: str, times: Times) -> None:
    """`model/adapters.py`: the squared row norms of a matrix that DoRA rescales and that is cut by columns, all-reduced."""
    magnitude = wire.planned.layer_table(moe).get(magnitude_of(name))
    if magnitude is not None and wire.adapted:
        wire.all_reduce("tensor", magnitude.numel * wire.planned.high_width, times.forward)


def regather_inputs(wire: Wire, calls: int, moe: bool, part: str, *, recomputed: bool = False) -> None:
    """The input of a part's matrices, all-gathered again in the backward pass if any of them needs it unchanged
    (`parallel/activations/saving.py`)."""
    planned = wire.planned
    if wire.forward_only:
        return
    table = planned.layer_table(moe)
    names = [name for name in FIRST_MATRICES if f"{part}{name}.weight" in table]
    if "q_down" in names:
        names.remove("q")
    readers = (table.get(f"{part}{name}.lora.A.weight", table[f"{part}{name}.weight"]) for name in names)
    fp8 = planned.run.train.fp8 == "tensorwise"
    if recomputed or any(
        p.learns
        and not planned.run.adapter.dropout
        and not (fp8 and uses_fp8_gemm(planned.run, p.multiplied_numel // p.shape[1], p.shape[1]))
        for p in readers
    ):
        wire.all_gather("tensor", planned.local_tokens * planned.run.model.hidden * planned.width, calls)


def context(wire: Wire, core: Times, block: Times) -> None:
    """`context.py`: the keys, values or heads that attention needs from the other slices of a sequence."""
    planned, m = wire.planned, wire.planned.run.model
    c, t = planned.size("context"), planned.size("tensor")
    heads = m.heads // t
    kv_heads = heads if m.attention == "latent" else max(1, m.kv_heads // t)
    each = planned.tokens * (m.key_dim + m.value_dim) * planned.width
    match planned.run.layout.context_method:
        case "ring":
            wire.send("context", kv_heads * each, core.forward * (c - 1))
            # Keys and values once more, and their gradients for the full round back to their rank.
            wire.send("context", kv_heads * each, core.backward * (c - 1 + c))
        case "gather":
            wire.all_gather("context", kv_heads * each, core.forward)
            wire.reduce_scatter("context", kv_heads * each, core.backward)
        case "ulysses":
            dealt = kv_heads if kv_heads % c == 0 else heads
            queries = planned.tokens * heads * m.key_dim * planned.width
            outputs = planned.tokens * heads * m.value_dim * planned.width
            wire.all_to_all("context", queries + dealt * each, core.forward + core.backward, messages=3)
            # This is the last operation of attention: recomputation of attention alone ends before it.
            wire.all_to_all("context", outputs, block.forward + core.backward)


def router(wire: Wire, ffn: Times, once: Times) -> None:
    """`expert.py`, all but the token rows: balance statistics, capacity, and experts cut over tensor ranks."""
    planned, lay, m = wire.planned, wire.planned.run.layout, wire.planned.run.model
    tokens = planned.local_tokens
    # The token count and the probability of each expert in each sequence.
    statistics = 2 * planned.run.train.microbatch * m.experts * planned.high_width
    wire.all_reduce("sequence", statistics, ffn.forward, messages=2)
    if m.expert_capacity:
        wire.all_gather("sequence", tokens * m.experts_per_token * INT64, ffn.forward)
    if lay.expert_tensor:
        chosen = tokens * m.experts_per_token
        wire.all_gather("tensor", chosen * (planned.high_width + INT64), ffn.forward, messages=2)
        wire.reduce_scatter("tensor", chosen * planned.high_width, ffn.backward)
        shard = tokens * m.hidden * planned.width
        # The sum of the experts' outputs ends the layer, unless shared experts follow.
        leaving = ffn if m.shared_experts else once
        wire.all_gather("tensor", shard, ffn.forward + leaving.backward)
        wire.reduce_scatter("tensor", shard, ffn.backward + leaving.forward)


def even_rows(planned: PlannedRank) -> Moved:
    """Rows that a rank sends to others in a step's forward passes of one MoE layer, under an even load."""
    (dispatched, arrived), n = rows_to_experts(planned), planned.run.stage_microbatches
    stay = arrived // planned.run.layout.expert
    return n * (dispatched - stay), n * (arrived - stay)


def dispatch(wire: Wire, ffn: Times, rows: Moved, calls: int) -> None:
    """`expert.py`: token rows dispatched to the ranks of their experts and combined, after their counts; where the experts'
    adapters use dropout, the rows' token indices travel too."""
    planned = wire.planned
    wire.all_to_all("expert", planned.run.model.experts * INT64, ffn.forward)
    passes = Fraction(ffn.forward + ffn.backward, calls)
    size = passes * sum(rows) * planned.run.model.hidden * planned.width
    wire.moved("expert", size, 2 * (ffn.forward + ffn.backward))
    adapted = any(p.entry.routed and p.entry.adapted for p in planned.layer_table(True).values())
    if planned.run.adapter.dropout and adapted and not wire.forward_only:
        wire.moved("expert", Fraction(ffn.forward, calls) * rows[0] * INT64, ffn.forward)


def loads(wire: Wire) -> None:
    """`train/step.py`: the token count of each expert, summed over the whole batch."""
    planned = wire.planned
    if planned.moe_layers:
        for group in ("zero", "tensor") if planned.run.layout.sync_every > 1 else ("replicate", "zero", "tensor"):
            wire.all_reduce(group, planned.moe_layers * planned.run.model.experts * LOAD)
        if planned.run.layout.directions > 1:
            wire.all_reduce("pipeline", planned.moe_layers * planned.run.model.experts * LOAD, ranks=2)
