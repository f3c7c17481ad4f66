"""The tensors that a stage of this project's trainer saves in the forward pass of a microbatch for the backward pass, one by one.

The rule is PyTorch's: an operation saves those of its inputs and results that its gradient needs, and a tensor that several
operations save counts once. A recomputed part, or a rematerialized tensor, saves its inputs instead. The saved tensors of the
modules of `model/`, for n rows; w is the width of the compute dtype, W that of high precision (w, or 4 bytes):

    linear       its input, or this rank's shard of an input that was gathered over the tensor ranks; and the cast copy of its
                 weight, where parameters are held in high precision and `fully_shard`'s all-gather has not cast them. In fp8:
                 the transposed weight, unless it was gathered in fp8; the transposed fp8 input instead of the input, with one
                 scale a tensor; and the scales
    rms norm     fused (CUDA): input and n W. Composed of small operations (CPU): the input and the normalized input, both in
                 high precision, and n W
    layer norm   input, means and deviations: 2 n w
    rope         cosines and sines, once for all layers
    alibi        nothing; with recomputed layers its elements of queries and keys, once for all layers
    attention    queries, keys, values, output and the log-sum-exp of each row. Without a fused kernel in PyTorch: queries,
                 keys, values in high precision, and the full score matrix. With a window: a mask in each layer, unless
                 varlen attention takes the window (CUDA, 16 bits)
      ring       the same; its output is copied for the output projection
      ulysses    the same for some heads over the whole sequence, and the output after its all-to-all
      gather     keys and values of the whole sequence, in order
    gate, up     silu and gelu save their input, the product with `up` saves both factors; relu saves its result
    router       its input in high precision, or unchanged where it has its own GEMM (CUDA, bfloat16); scores, choices, weights
    experts      rows sorted by expert, the saved tensors of gate and up for these, and the expert outputs of each token before
                 they are weighted; the order and its inverse, or only the index of each choice where kernels dispatch (CUDA)
    loss         probabilities over the vocabulary in high precision; over tensor ranks also which targets are local. In chunks:
                 the gradients of its input and, in high precision, of the head's matrix. From log-probabilities: its input, and
                 for each token the log-sum-exp and the gradient of each target; with a teacher also the target ids

Between stages: the input that came from the previous stage, and the output that went to the next.
Frozen parameters are not cast, and a frozen matrix does not save its input. Its adapter saves the input, and A's scaled output.
Two things that a run does not specify are assumed: routers choose all experts equally often, unless the rows are given; and
documents are not packed.

The cost model has saved bytes of its own (`Op.saved` in `plan/cost/ops.py`): closed forms for any framework and for many layouts
at once. They go operation by operation, so they do not see that two operations share a tensor, and can't be derived from this
list; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

from shardwise.plan.cost.operations import quantized
from shardwise.plan.trainer.rank import PlannedRank, Stage
from shardwise.plan.trainer.saved_experts import moe
from shardwise.plan.trainer.saved_layers import attention, feed_forward, gathered, linear, norm
from shardwise.plan.trainer.tape import Tape
from shardwise.plan.trainer.units import head_gradient_width
from shardwise.run.derive import uses_varlen_attention
from shardwise.run.dtypes import INT32, INT64

Rows = Mapping[int, tuple[int, int]]
"""By MoE layer: rows that a rank has for the experts in a microbatch, and rows that reach the experts it holds."""
FEW = 3
"""How many of a series of identical layers are listed: each further one saves the same as the last of these. Only the first ones
share tensors with what came before them."""


@dataclass(frozen=True)
class Saved:
    """Bytes that a stage saves for one microbatch."""

    whole: int
    """Between its forward and its backward pass."""
    deferred: int
    """Between the two halves of a split backward pass: inputs and output gradients of GEMMs, for the deferred weight gradients."""
    recomputed: int
    """Extra bytes that a recomputed layer holds while it is recomputed."""
    away: int = 0
    """Offloaded from the device, between its forward and its backward pass."""


def block(tape: Tape, x: str, layer: int, rows: Rows | None) -> str:
    """One layer; returns the name of its output."""
    planned, m = tape.planned, tape.planned.run.model
    tokens = planned.local_tokens
    tape.parameters = planned.layer_table(m.is_moe(layer))
    if planned.run.memory.activation_bits:
        tape.few_bits = quantized(m, routed=m.is_moe(layer))
    with tape.part("block", x):
        normed = norm(tape, x, "attention_norm", tokens)
        tape.rematerialized("attention_norm", normed, x)
        attended = attention(tape, gathered(tape, normed, "attention input"))
        if m.parallel_block and m.has_ffn_norm:
            normed = norm(tape, x, "ffn_norm", tokens)
        elif m.has_ffn_norm:
            middle = tape.make("middle", tokens * m.hidden)
            tape.rematerialized("middle", middle, x, attended)
            normed = norm(tape, middle, "ffn_norm", tokens)
            tape.rematerialized("ffn_norm", normed, middle)
        if m.is_moe(layer):
            with tape.part("ffn", normed):
                moe(tape, normed, rows[layer] if rows else None)
        else:
            whole = gathered(tape, normed, "ffn input")
            with tape.part("ffn", whole):  # the all-gather is before this part, so it is not recomputed
                feed_forward(tape, whole, "ffn")
    return tape.make("out", tokens * m.hidden)


def saved(planned: PlannedRank, stage: Stage, rows: Rows | None = None) -> Saved:
    """Bytes that a stage saves for the backward pass of one microbatch."""
    run, m = planned.run, planned.run.model
    tape = Tape(planned)
    x = tape.make("input", planned.local_tokens * m.hidden)
    if not stage.first:
        tape.save(x)
    if stage.first and run.layout.tensor > 1 and not run.adapter.used:
        tape.save_new("embedding rows", planned.tokens, INT64)
        tape.save_new("embedding known", planned.tokens, 1)
    if m.embedding_norm and stage.first and not run.adapter.used:
        tape.parameters = {p.entry.name: p for p in planned.outer_parameters(stage)}
        norm(tape, tape.make("embedded", planned.local_tokens * m.hidden), "embed_norm", planned.local_tokens)
    if m.position == "learned" and m.position_offset and stage.first and not run.adapter.used:
        tape.save_new("positions", run.train.seq_len // run.layout.context, INT64)
    if m.position == "rotary" and stage.layers:
        width = m.rope_dim if m.attention == "latent" else m.head_dim
        tape.save_new("rope", 2 * run.train.seq_len // run.layout.context * width, planned.high_width)
    if m.position == "alibi" and any("block" in parts for parts in recomputed_parts(planned, stage).values()):
        heads, each = m.heads // run.layout.tensor, m.key_dim - m.head_dim
        tape.save_new("alibi", (heads + run.train.seq_len // run.layout.context) * each)
    windowed = 0 < m.sliding_window < run.train.seq_len
    if stage.layers and windowed and run.layout.context > 1 and run.layout.context_method != "ulysses":
        tape.save_new("bounds", run.train.seq_len, INT32)
    masked = windowed and not uses_varlen_attention(run, gpu=planned.fused)
    recomputes: int | Fraction = 0
    left_out: list[int | Fraction] = [0, 0, 0]
    before = tape.totals
    for layers, recomputed in _alike(recomputed_parts(planned, stage), m.is_moe, listed=rows is not None):
        tape.recomputed = recomputed
        for n, layer in enumerate(layers[:FEW]):
            tape.prefix = f"{layer} "
            if n == FEW - 1:
                before = tape.totals
            if recomputed:
                recomputes = max(recomputes, _recomputed_bytes(tape, x, layer, rows))
            x = block(tape, x, layer, rows)
            if recomputed & {"block", "attention"} and run.layout.context == 1 and masked:
                tape.sizes["mask"] = run.train.seq_len**2
                tape.save("mask")
        if len(layers) > FEW:
            further = (now - then for now, then in zip(tape.totals, before, strict=True))
            left_out = [size + (len(layers) - FEW) * more for size, more in zip(left_out, further, strict=True)]
    tape.prefix, tape.recomputed = "", frozenset()
    if any(m.is_moe(layer) for layer in stage.layers):
        tape.save_new("auxiliary losses", 3, planned.high_width)
    if stage.last:
        loss(tape, x)
    else:
        tape.save(x)
    whole, deferred, away = (round(size + more) for size, more in zip(tape.totals, left_out, strict=True))
    return Saved(whole, deferred, round(recomputes), away)


def _alike(
    layers: Mapping[int, frozenset[str]], is_moe: Callable[[int], bool], *, listed: bool
) -> Iterator[tuple[list[int], frozenset[str]]]:
    """Consecutive layers that save the same, with their recomputed parts; each layer alone where rows are `listed` by layer."""
    for (_, recomputed, _), some in groupby(
        layers, key=lambda layer: (is_moe(layer), layers[layer], layer if listed else 0)
    ):
        yield list(some), recomputed


def _recomputed_bytes(tape: Tape, x: str, layer: int, rows: Rows | None) -> int | Fraction:
    """Bytes that a layer saves without recomputation, minus the bytes that it saves with it."""
    sizes = []
    for recomputed in (frozenset[str](), tape.recomputed):
        alone = replace(tape, sizes={x: 0}, saved=set(), deferred={}, made={}, away={}, recomputed=recomputed)
        block(alone, x, layer, rows)
        sizes.append(alone.totals[0])
    return sizes[0] - sizes[1]


def recomputed_parts(planned: PlannedRank, stage: Stage) -> dict[int, frozenset[str]]:
    """The layers of a stage, each with its recomputed parts."""
    lay, found = planned.run.layout, planned.recomputed
    norms = lay.recompute == "operations" and "norm" in lay.recompute_operations
    with_norms = stage.layers[:: lay.recompute_every] if norms else ()
    return {layer: found[layer] | ({"norm"} if layer in with_norms else set()) for layer in stage.layers}


def loss(tape: Tape, x: str) -> None:
    """The end of the network: norm, head and cross-entropy."""
    planned, stage, high = tape.planned, tape.planned.stages[-1], tape.planned.high_width
    tape.parameters = {p.entry.name: p for p in planned.outer_parameters(stage)}
    head = planned.vocabulary(stage)
    normed = norm(tape, x, "norm", planned.local_tokens)
    tape.save_new("loss", 1, high)
    if planned.chunked:  # the gradients of its input and of the head are made in the forward pass
        tape.save_new("gradient of the head's input", planned.tokens * head.shape[1])
        if head.learns:
            tape.save_new("gradient of the head", head.numel, head_gradient_width(planned, head))
    elif planned.objective.scores:
        tape.save(normed)
        tape.save_new("gradient of scores", planned.local_tokens, high)
    elif planned.objective.logprobs:  # the logits are recomputed from the head's input
        tape.save(gathered(tape, normed, "head input"))
        tape.save_new("log-sum-exp and the gradient of log-probabilities", (1 + planned.targets) * planned.tokens, high)
        if planned.objective.teacher:
            tape.save_new("the tokens of both", planned.targets * planned.tokens, INT64)
    else:
        linear(tape, gathered(tape, normed, "head input"), head.entry.name.removesuffix(".weight"))
        tape.save_new("probabilities", planned.tokens * head.shape[0], high)
        if planned.run.layout.tensor == 1:
            tape.save_new("total weight", 1, high)  # of PyTorch's `nll_loss`
        else:
            tape.save_new("target rows", planned.tokens, INT64)
            tape.save_new("targets local and counted", 2 * planned.tokens, 1)
