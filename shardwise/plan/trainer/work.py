"""FLOPs of one rank in one step of this project's trainer, by part of the network and pass.

The GEMMs are those of the parameters that the rank holds, and attention's two under the causal mask and the window; a multiply-add
is two FLOPs. Norms, activations, the embedding's lookup and the optimizer's elementwise work are not counted; Muon's GEMMs are
(`muon.py`). With T tokens of a microbatch on a context rank, and `pairs` of a query and a key that it sees:

    GEMM        2 T x elements of the weight on the rank     forward, again for its input, again for its weight if that is trained
    attention   2 pairs x heads/t x (width of keys + width of values)     forward, and twice backward, to its inputs
    experts     as GEMMs, on the rows of an even load

Work that several ranks duplicate counts on each of them: keys and values with fewer heads than tensor ranks, and the
down-projections of latent attention. Without it, and without recomputation, all ranks together do three times the model's forward
pass (`plan/cost/flops.py`). The cost model lists the same GEMMs with their seconds (`plan/cost/operations.py`), for other programs
too and for many layouts at once; it fuses the weights of one input into one GEMM. A test compares it with this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.ledger import PASSES, Work
from shardwise.plan.trainer import muon
from shardwise.plan.trainer.rank import PlannedParameter, PlannedRank, first_ranks, reference_run
from shardwise.plan.trainer.rows import rows_to_experts
from shardwise.run import Run
from shardwise.run.derive import logit_columns, uses_fp8_gemm
from shardwise.run.parameters import matrix_of

CONVENTION = (
    "hardware FLOPs: causal attention (backward twice the forward), head in, embedding lookup out, recomputation in, "
    "Muon's products in"
)
BLOCK, FFN = frozenset({"block"}), frozenset({"block", "ffn"})
ATTENTION = frozenset({"block", "attention", "attended"})
HEADS, MIDDLE = BLOCK | {"heads"}, BLOCK | {"middle"}
NEVER: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GemmFlops:
    """FLOPs of one GEMM, forward, for one microbatch."""

    part: str
    flops: float
    recomputed_with: frozenset[str] = NEVER
    """The parts of a layer that recompute it."""
    learns: bool = True
    """Whether its weight has a gradient."""
    constant: bool = False
    """Whether it is detached from the gradient, and so has no backward pass."""
    padding: float = 0.0
    """FLOPs for columns of zeros, which its weight's gradient is spared."""
    weight: bool = True
    """Whether it has a weight. Attention's own GEMMs have none: both halves of their backward pass are for inputs."""


def work(run: Run, rank: int | None = None) -> Work:
    """FLOPs of a rank in one step; without `rank`, of the rank that has most."""
    if rank is None:
        return max((work(run, candidate) for candidate in first_ranks(run)), key=lambda w: w.total)
    planned = PlannedRank(run, rank)
    flops: dict[str, dict[str, float]] = {}
    for times, gemm, recomputed in _gemms(planned):
        passes = flops.setdefault(gemm.part, dict.fromkeys(PASSES[:4], 0.0))
        count = times * run.stage_microbatches
        total, to_weight = count * (gemm.flops + gemm.padding), count * gemm.flops
        passes["forward"] += planned.objective.forward_only * total
        if gemm.part == "head" and planned.makes_logits_again:
            passes["recompute"] += total
        elif gemm.part == "head" and planned.chunked:  # its gradients are made in the forward pass
            passes["forward"] += 2 * total + gemm.learns * to_weight
            continue
        passes["forward"] += total
        passes["recompute"] += total if recomputed & gemm.recomputed_with else 0.0
        if gemm.constant:
            continue
        passes["backward_input"] += total if gemm.weight else 2 * total
        passes["backward_weight"] += to_weight if gemm.weight and gemm.learns else 0.0
    if planned.objective.reference:  # the same network without adapters, or a teacher
        for times, gemm, _ in _gemms(PlannedRank(reference_run(run), rank), frozen=True):
            flops.setdefault(gemm.part, dict.fromkeys(PASSES[:4], 0.0))["forward"] += (
                planned.objective.reference * times * run.stage_microbatches * (gemm.flops + gemm.padding)
            )
    flops["parameters"] = {"optimizer": muon.flops(planned) if run.train.optimizer == "muon" else 0.0}
    return Work(flops, convention=CONVENTION)


def _gemms(planned: PlannedRank, frozen: bool = False) -> Iterator[tuple[int, GemmFlops, frozenset[str]]]:
    """Every GEMM of a rank, once for identical layers: their count, the GEMM, and which parts of these layers are recomputed. Of a
    `frozen` network only log-probabilities are asked for."""
    counts: dict[tuple[bool, frozenset[str]], int] = {}
    for layer, recomputed in planned.recomputed.items():
        kind = planned.run.model.is_moe(layer), recomputed
        counts[kind] = counts.get(kind, 0) + 1
    for (moe, recomputed), times in counts.items():
        for gemm in layer_gemms(planned, moe):
            yield times, gemm, recomputed
    if planned.stages[-1].last:
        head = planned.vocabulary(planned.stages[-1])
        tokens = planned.local_tokens if planned.objective.scores else planned.tokens
        pads = frozen and not planned.run.train.invariant
        columns = logit_columns(head.shape[0]) if pads else planned.logit_columns
        padding = 2.0 * tokens * (columns - head.shape[0]) * head.shape[1]
        yield 1, GemmFlops("head", 2.0 * tokens * head.numel, learns=head.learns, padding=padding), NEVER


def layer_gemms(planned: PlannedRank, moe: bool) -> Iterator[GemmFlops]:
    """The GEMMs of one layer."""
    yield _attention(planned)
    for parameter in planned.layer_parameters(moe):
        if parameter.entry.multiplied:
            yield _gemm(planned, parameter)
        elif parameter.entry.init == "magnitude":
            yield _lengths(planned, moe, parameter)


def _gemm(planned: PlannedRank, parameter: PlannedParameter) -> GemmFlops:
    """The GEMM of one weight of a layer."""
    numel, learns = parameter.multiplied_numel, parameter.learns
    match parameter.entry.owner:
        case "attention":
            ends = MIDDLE if parameter.entry.init == "residual" else HEADS
            return GemmFlops("attention", 2.0 * planned.tokens * numel, ends, learns)
        case "router":  # sees its own slice of the sequence, also where the experts are cut over the tensor ranks
            return GemmFlops("router", 2.0 * planned.tokens / planned.run.layout.tensor * numel, FFN, learns)
        case "experts":
            each = numel // parameter.shape[0]
            return GemmFlops("experts", 2.0 * rows_to_experts(planned)[1] * each, FFN, learns)
    if parameter.entry.name in ("ffn.gate.weight", "ffn.up.weight"):
        return GemmFlops("ffn", 2.0 * planned.tokens * numel, FFN | {parameter.entry.name.split(".")[1]}, learns)
    inside = FFN if parameter.entry.init != "residual" or _recomputes_last(planned, parameter) else NEVER
    return GemmFlops("ffn", 2.0 * planned.tokens * numel, inside, learns)


def _lengths(planned: PlannedRank, moe: bool, magnitude: PlannedParameter) -> GemmFlops:
    """B times A, for DoRA's row norms of an adapted matrix (`model/adapters.py`)."""
    matrix = planned.layer_table(moe)[matrix_of(magnitude.entry.name)]
    flops, owner = 2.0 * planned.run.adapter.rank * matrix.multiplied_numel, magnitude.entry.owner
    part = "ffn" if owner == "shared_experts" else owner
    return GemmFlops(part, flops, BLOCK if owner == "attention" else FFN, constant=True)


def _recomputes_last(planned: PlannedRank, parameter: PlannedParameter) -> bool:
    """Whether recomputation runs a layer's last GEMM. It need not, since the backward pass needs its input, not its output. But it
    does where the GEMM overlaps with its reduce-scatter, where its weight gradient is deferred, where it is in fp8, where its
    weight has 4 bits, and where DoRA rescales it."""
    lay, fp8 = planned.run.layout, uses_fp8_gemm(planned.run, parameter.shape[0], parameter.shape[1])
    needed = parameter.entry.packed > 1 or (parameter.entry.adapted and planned.run.adapter.kind == "dora")
    return (lay.tensor > 1 and lay.async_tensor) or (planned.splits_backward and parameter.learns) or fp8 or needed


def _attention(planned: PlannedRank) -> GemmFlops:
    m, lay, train = planned.run.model, planned.run.layout, planned.run.train
    # With Ulysses a rank has some heads of whole sequences, otherwise a slice of the sequence with all heads.
    if lay.context_method == "ulysses":
        pairs = visible_pairs(m.sliding_window, train.seq_len, range(train.seq_len)) / lay.context
    else:
        pairs = float(sum(visible_pairs(m.sliding_window, train.seq_len, part) for part in chunks(planned)))
    flops = 2.0 * train.microbatch * pairs * (m.heads // lay.tensor) * (m.key_dim + m.value_dim)
    return GemmFlops("attention", flops, ATTENTION, weight=False)


def chunks(planned: PlannedRank) -> tuple[range, ...]:
    """The positions of a sequence on this context rank: a chunk from the front and its mirror image from the back."""
    length, c, rank = planned.run.train.seq_len, planned.run.layout.context, planned.index("context")
    if c == 1:
        return (range(length),)
    size = length // (2 * c)
    return tuple(range(n * size, (n + 1) * size) for n in (rank, 2 * c - 1 - rank))


def visible_pairs(window: int, length: int, queries: range) -> int:
    """Pairs of these queries and the keys they see under the causal mask and the window."""
    window = min(window or length, length)

    def before(query: int) -> int:
        short = min(query, window)
        return short * (short + 1) // 2 + (query - short) * window

    return before(queries.stop) - before(queries.start)
