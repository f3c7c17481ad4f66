"""Bytes that a rank of this project's trainer holds, exactly: parameters, gradients and optimizer state, which stay, and the saved
activations, which come and go with the schedule (tensor by tensor in `saved.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from shardwise.plan.cost.host import STEP_COUNT, HostBytes, device_width, gradients_in_flight, host_bytes
from shardwise.plan.trainer import compression
from shardwise.plan.trainer.ends import handed_bytes
from shardwise.plan.trainer.rank import PlannedRank, planned_rank, reference_run
from shardwise.plan.trainer.saved import Saved, recomputed_parts, saved
from shardwise.plan.trainer.units import outer_units, secondary_bytes, tokens_of_chunk
from shardwise.run import Run
from shardwise.run.axes import HOLDS_ALL
from shardwise.run.derive import chunk_bytes, chunk_rows, forward_passes
from shardwise.run.dtypes import DTYPE_BYTES, INT64
from shardwise.schedules import PASSES, Schedule, cached_schedule, fewer_rounds, peak_activations, versions_kept


def state_bytes(run: Run, rank: int) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients after the backward passes, and optimizer state.

    Parameters and gradients are float32, or float64 where the compute dtype is; frozen parameters have the compute dtype, no
    gradient and no optimizer state. The unsent errors of compressed gradients count as optimizer state. A matrix with a compute
    copy counts with that copy, and its gradient has the dtype of the copy. `fully_shard` divides the rows of parameters and
    gradients into equal shards and pads the last ones; optimizer state has no padding. Experts are sharded along a dimension that
    needs no padding, where they have one. DistributedDataParallel's gradients are views of its buckets, which hold nothing else.
    A frozen network beside the trained one counts among the parameters, in the compute dtype; so do the earlier weight versions of
    an asynchronous pipeline.
    """
    planned = planned_rank(run, rank)
    low = planned.width
    parameters = gradients = optimizer = 0
    for count, parameter in planned.parameters():
        ranks, index = planned.sharding(parameter)
        copied = planned.keeps_compute_copies and parameter.is_gemm_weight
        high = planned.held_width(parameter)
        if run.memory.hosts_optimizer:  # the host holds the rest
            parameters += count * parameter.numel * device_width(parameter.entry, low)
            continue
        parameters += count * (parameter.shard_numel(ranks) * high + parameter.numel * low * copied)
        if not parameter.learns:
            continue
        parameters += count * weight_versions(planned) * parameter.shard_numel(ranks) * high
        gradients += count * parameter.shard_numel(ranks) * (low if copied else high)
        own = parameter.own_numel(ranks, index) * high
        muon = run.train.optimizer == "muon" and parameter.entry.is_layer_matrix
        optimizer += count * (own if muon else 2 * own + STEP_COUNT)
        optimizer += count * compression.state_bytes(planned, parameter)
    if forward_passes(run)[0]:
        frozen = planned_rank(reference_run(run), rank)
        parameters += sum(n * p.shard_numel(frozen.sharding(p)[0]) * low for n, p in frozen.parameters())
    return dict(parameters=parameters, gradients=gradients, optimizer=optimizer)


def weight_versions(planned: PlannedRank) -> int:
    """Versions of its weights that a rank of an asynchronous pipeline keeps beside the latest."""
    lay = planned.run.layout
    behind = lay.pipeline - 1 - planned.index("pipeline")
    return versions_kept(lay.schedule, behind, planned.run.accumulation) if lay.asynchronous else 0


def hosted(run: Run) -> HostBytes:
    """Bytes on the host where it runs the optimizer, for the run's only rank; moments in files are not in its memory."""
    found = host_bytes(run.model, DTYPE_BYTES[run.train.dtype], several=run.accumulation > 1)
    return found._replace(held=found.held - found.moments) if run.memory.on_disk else found


def alike(planned: PlannedRank) -> tuple[object, ...]:
    """A key that is equal for two pipeline ranks, each represented by its first rank, that hold and recompute the same, apart from
    the number of microbatches in flight."""
    return weight_versions(planned), planned.kinds


def saved_by_stages(planned: PlannedRank) -> tuple[Saved, ...]:
    """The bytes that each stage of a rank saves for a microbatch under an even load."""
    return tuple(_saved(planned).values())


def made_for_gemms(planned: PlannedRank) -> int:
    """Bytes of the largest 4-bit matrix after it is dequantized for its GEMM; the copy lives only that long."""
    sizes = (p.multiplied_numel for _, p in planned.parameters() if p.entry.packed > 1)
    return max(sizes, default=0) * planned.width


def logits(planned: PlannedRank) -> int:
    """Bytes of the loss's temporary tensors beside its saved tensors, where a rank has the loss."""
    if not planned.stages[-1].last:
        return 0
    matrix = planned.vocabulary(planned.stages[-1])
    rows, columns = matrix.shape[0], planned.logit_columns
    if planned.objective.scores:  # one number for each token
        return 2 * planned.tokens * planned.high_width
    if planned.objective.logprobs:  # a chunk of logits, also in high precision, and the gradient of the head
        some = chunk_rows(planned.tokens, max(1, rows) * planned.high_width, chunk_bytes(planned.run))
        high = rows * planned.high_width * (planned.width < planned.high_width)
        head = some * (columns * planned.width + high)
        padded = planned.width * columns * (columns != rows)
        head += planned.run.model.hidden * (planned.high_width * matrix.learns * rows + padded)
        kept, at_loss = _of_targets(planned)
        return max(head + kept, at_loss) + _said_by_teacher(planned)
    if planned.chunked:  # a chunk of logits, overwritten by their gradient, and the head's matrix if cast or padded
        some = tokens_of_chunk(planned)
        return (some + planned.run.model.hidden * (planned.casts(matrix) or columns != rows)) * columns * planned.width
    # The probabilities are saved; beside them are two tensors of their size: their gradient and that of the logits.
    return 2 * planned.tokens * rows * planned.high_width


def _of_targets(planned: PlannedRank) -> tuple[int, int]:
    """Bytes of the tensors for several targets per token (`model/logprobs.py`, `train/objectives/distill.py`). Beside a chunk of
    logits: the targets' ids in the vocabulary and in this rank's slice of it, masks of which count and which are local, their
    logits, and their log-probabilities or gradients. At the loss, when no logits are held, also the log-probabilities of both
    models with all other tokens as one more outcome, and terms computed from these."""
    if planned.targets == 1:
        return 0, 0
    count = planned.tokens * planned.targets
    kept = count * (2 * INT64 + 2 + 2 * planned.high_width)
    return kept, kept + 5 * count * planned.high_width


def _said_by_teacher(planned: PlannedRank) -> int:
    """Bytes of the teacher's tokens and log-probabilities of all microbatches of a step, made before the first is trained on."""
    each = (planned.targets - 1) * (INT64 + planned.high_width)
    return planned.run.stage_microbatches * planned.tokens * each


# What a stage saves depends on these; its position and the ZeRO level make no difference.
_OF_RUN = attrgetter("model", "train", "objective", "adapter", "memory.activation_bits", "memory.lossless")
_OF_LAYOUT = attrgetter(
    "context", "tensor", "expert", "shard", "context_method", "async_tensor", "expert_tensor", "offload",
    "recompute", "recompute_operations", "recompute_every",
)  # fmt: skip
_OF_RANK = attrgetter("fused", "run.layout.sharding_replicas", "keeps_compute_copies", "is_sharded")
_KNOWN: dict[tuple[object, ...], dict[tuple[object, ...], Saved]] = {}


def _saved(planned: PlannedRank) -> dict[int, Saved]:
    """`saved` of each stage under an even load, cached: identical stages save the same."""
    run, is_moe = planned.run, planned.run.model.is_moe
    where = (planned.index("tensor"), planned.index("expert"))
    if len(_KNOWN) > 1000:
        _KNOWN.clear()
    known = _KNOWN.setdefault((_OF_RUN(run), _OF_LAYOUT(run.layout), _OF_RANK(planned), where), {})
    found = {}
    for stage in planned.stages:
        layers = tuple((is_moe(layer), parts) for layer, parts in recomputed_parts(planned, stage).items())
        kind = (stage.first, stage.last, layers)
        if kind not in known:
            known[kind] = saved(planned, stage)
        found[stage.number] = known[kind]
    return found


def activations(planned: PlannedRank, each: Sequence[Saved] = ()) -> int:
    """Peak bytes that all microbatches in flight save on a rank, as its schedule runs; `each`: the saved bytes of its stages, if
    known."""
    each = each or saved_by_stages(planned)
    if len(planned.placement) == 1:
        return each[0].whole
    return _peak(planned, *by_number(planned, each))


def _peak(planned: PlannedRank, whole: list[int], deferred: list[int]) -> int:
    """The peak of what all microbatches in flight save on a rank, given what one saves on each stage."""
    schedule, longer = short_schedule(planned.run)
    own, handed = replace(schedule, ranks=(schedule.ranks[planned.index("pipeline")],)), [0] * len(whole)
    passed_on = {action.stage for action in own.ranks[0] if action.kind in ("E", "L")} if schedule.partners else ()
    for number in passed_on:
        handed[number] = handed_bytes(planned.run, planned.rank, number)
    return round(peak_activations(own, whole, deferred, handed)[0] * longer)


def by_number(planned: PlannedRank, each: Sequence[Saved]) -> tuple[list[int], list[int]]:
    """What one microbatch saves on each stage of the network, 0 on those of other ranks: until its backward pass, and between the
    two halves of a split one."""
    saves = {stage.number: one for stage, one in zip(planned.stages, each, strict=True)}
    whole, deferred = ([0] * len(planned.placement) for _ in range(2))
    for number, stage in saves.items():
        # A stage's output and the next one's input, where both are here, are one tensor; the first saves it longer.
        given = number - 1 in saves and not planned.run.layout.has_ends(number)[0]
        whole[number] = stage.whole - (planned.residual if given else 0)
        deferred[number] = stage.deferred
    return whole, deferred


def activations_away(planned: PlannedRank) -> int:
    """Peak bytes of the saved activations that are offloaded from the device."""
    saves = {number: stage.away for number, stage in _saved(planned).items()}
    if len(planned.placement) == 1:
        return saves[0]
    away = [saves.get(number, 0) for number in range(len(planned.placement))]
    return _peak(planned, away, [0] * len(away))


def short_schedule(run: Run) -> tuple[Schedule, float]:
    """The run's schedule, or one of fewer microbatches; and by what factor the peak of the full schedule is higher."""
    lay, n = run.layout, run.accumulation
    count = fewer_rounds(lay.pipeline, n, 4)
    schedule = cached_schedule(lay.schedule, lay.pipeline, count, lay.stages_per_rank)
    # These schedules hold every microbatch.
    return schedule, n / count if lay.schedule in HOLDS_ALL else 1.0


def gathered(planned: PlannedRank) -> int:
    """Peak bytes of unsharded parameters between two passes. Below ZeRO-3: all of them. With ZeRO-3: those outside of the layers
    without a pipeline, except an embedding that is gathered apart, and the prefetched layers with one. The secondary shards of
    layers come on top."""
    run = planned.run
    if not planned.is_sharded:
        return 0
    if not run.layout.gathers_each_pass:
        stays = list(planned.parameters())
    elif run.layout.pipeline == 1:
        units = (unit for stage in planned.stages for unit, freed in outer_units(planned, stage) if not freed)
        stays = [(1, parameter) for unit in units for parameter in unit]
    else:
        return _prefetched(planned)
    total = sum(secondary_bytes(planned, planned.layer_parameters(run.model.is_moe(n))) for n in planned.recomputed)
    for count, parameter in stays:
        ranks, _ = planned.sharding(parameter)
        alone = parameter.entry.routed and ranks == run.layout.sharding_replicas == 1 and not run.layout.offload
        if not alone:  # experts that no other rank has a shard of are not gathered
            total += count * planned.gathered_shard(parameter, ranks) * ranks
    return total


def _prefetched(planned: PlannedRank) -> int:
    """Peak bytes of the layers that `fully_shard` holds between two passes. After a backward pass it prefetches the layer that ran
    before the matching forward pass, which it takes to be the latest one. The next forward pass reshards that layer, and leaves
    secondary shards."""
    sizes = {s.number: planned.prefetched_shard(s) * planned.size("zero") for s in planned.stages}
    is_moe = planned.run.model.is_moe
    near = {
        s.number: sum(secondary_bytes(planned, planned.layer_parameters(is_moe(n))) for n in s.layers)
        for s in planned.stages
    }
    forwards: dict[int, list[int]] = {number: [] for number in sizes}
    seen, held, peak = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0), 0
    actions = [a for a in planned.schedule.ranks[planned.index("pipeline")] if a.kind in PASSES]
    splits, total = planned.splits_backward, 0
    for kind, stage, _ in actions:
        if kind == "F":
            forwards[stage].append(seen[stage])
            seen[stage] += 1
            now = near[stage]
        else:
            done = len(planned.schedule.microbatches_of(stage)) == seen[stage] and len(forwards[stage]) == 1
            first = forwards[stage].pop() == 0
            now = 0 if first or (done and not splits) else sizes[stage]
        total += now - held[stage]
        held[stage] = now
        peak = max(peak, total)
    return peak


def passing_gradients(planned: PlannedRank, *, compiled: bool) -> int:
    """Bytes of the gradients in the widest part of a layer while all its saved tensors still exist: of the product of gate and up,
    and of one of the two. A compiled layer computes them in place, except for experts that other ranks send rows to: there it is
    that beside a matrix's gradient, or the gradients of the rows and of all matrices."""
    m, lay = planned.run.model, planned.run.layout
    if compiled:
        return _passing_in_experts(planned) if m.experts and lay.expert > 1 else 0
    width = max(m.ffn, m.expert_ffn * m.experts_per_token) // lay.tensor
    return (2 if m.gated else 1) * planned.tokens * width * planned.width


def _passing_in_experts(planned: PlannedRank) -> int:
    m, lay = planned.run.model, planned.run.layout
    cut = lay.tensor if lay.expert_tensor else 1
    rows, width = planned.local_tokens * cut * m.experts_per_token, m.expert_ffn // cut
    matrix = m.experts // lay.expert * width * m.hidden
    return max(2 * rows * width + matrix, rows * m.hidden + 3 * matrix) * planned.width


def last_gradient(planned: PlannedRank) -> int:
    """Bytes of the gradient that is computed after all saved activations are freed: the embedding's."""
    run = planned.run
    if run.model.tied_embeddings or not planned.stages[0].first or run.memory.hosts_optimizer:
        return 0
    embedding = planned.first_parameters(planned.stages[0])[0]
    return embedding.shard_numel(planned.sharding(embedding)[0]) * planned.high_width * embedding.learns


def transposed_gradient(planned: PlannedRank) -> int:
    """Bytes of the second copy of a gradient that is sharded along a dimension other than the first: `fully_shard` makes its shards
    contiguous before the reduce-scatter, one matrix at a time."""
    sizes = (p.numel for _, p in planned.parameters() if p.learns and p.shard_dim(planned.sharding(p)[0]))
    return max(sizes, default=0) * planned.width


def peak_gradients(planned: PlannedRank, after: int) -> int:
    """Peak bytes of gradients between two passes, which are unsharded where they are reduced once a step. `after`: their bytes
    after all passes."""
    run = planned.run
    if run.memory.hosts_optimizer:
        return gradients_in_flight(hosted(run))
    once = run.layout.zero == 1 and run.stage_microbatches > 1
    if not planned.is_sharded or not (once or planned.splits_backward):
        return after
    unsharded, sharded = dict[int, int](), dict[int, int]()
    known: dict[tuple[object, bool], tuple[int, int]] = {}
    adding = _add_up_deferred(planned) if planned.splits_backward else frozenset()
    for stage, own_kind in zip(planned.stages, planned.kinds, strict=True):
        summed = stage.number in adding
        kind = (own_kind, summed)
        if kind not in known:
            own = [(count, p) for count, p in planned.parameters(stages=(stage,)) if p.learns]
            shards = (count * p.shard_numel(planned.sharding(p)[0]) for count, p in own)
            whole = planned.reduce_width * sum(count * p.numel for count, p in own)
            if planned.splits_backward and planned.width < planned.reduce_width:
                # Deferred gradients keep the compute dtype until the stage's next backward pass, or the end, sums them.
                matrices = sum(count * p.numel for count, p in own if p.entry.is_linear)
                whole += matrices * (planned.width - (0 if summed else planned.reduce_width))
            known[kind] = whole, planned.high_width * sum(shards)
        unsharded[stage.number], sharded[stage.number] = known[kind]
    if planned.splits_backward:  # all stages are reduced at the end
        return max(sum(unsharded.values()), sum(sharded.values()))
    backward = [a.stage for a in planned.schedule.ranks[planned.index("pipeline")] if a.kind == "B"]
    left, held = Counter(backward), dict.fromkeys(unsharded, 0)
    total = peak = 0
    for number in backward:
        left[number] -= 1
        now = unsharded[number] if left[number] else sharded[number]
        total += now - held[number]
        held[number] = now
        peak = max(peak, total)
    return peak


def _add_up_deferred(planned: PlannedRank) -> frozenset[int]:
    """Stages with a backward pass after the weight gradients of an earlier microbatch, which that pass accumulates."""
    deferred, adding = set[int](), set[int]()
    for kind, stage, _ in planned.schedule.ranks[planned.index("pipeline")]:
        if kind in "IB" and stage in deferred:
            adding.add(stage)
        if kind in "BW":
            deferred.add(stage)
    return frozenset(adding)


def compiled_away(planned: PlannedRank) -> float:
    """Share of the saved activations that a compiled layer does not save: it recomputes the gate's activation function from the
    gate, in experts as in dense layers. Experts that other ranks send rows to are not compiled."""
    m, lay = planned.run.model, planned.run.layout
    if not m.gated:
        return 0.0
    kept = [m.is_moe(layer) for layer, recomputed in planned.recomputed.items() if not recomputed]
    dense = kept.count(False) * planned.tokens * m.ffn // lay.tensor
    width = m.expert_ffn // (lay.tensor if lay.expert_tensor else 1)
    tokens = planned.local_tokens * (lay.tensor if lay.expert_tensor else 1)
    routed = tokens * m.experts_per_token * width * (lay.expert == 1)
    routed += planned.tokens * m.shared_experts * m.expert_ffn // lay.tensor
    away = (dense + kept.count(True) * routed) * planned.width
    return away / max(1, sum(stage.whole for stage in _saved(planned).values()))
