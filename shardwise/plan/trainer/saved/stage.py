"""What a whole stage saves: its blocks one after the other, what is computed again, and the loss at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from shardwise.plan.trainer.rank import Place, Stage
from shardwise.plan.trainer.saved.attention import attention
from shardwise.plan.trainer.saved.feed_forward import feed_forward, mixture
from shardwise.plan.trainer.saved.tape import Tape, gathered, linear, norm
from shardwise.plan.trainer.traffic import INTEGER
from shardwise.run.derive import uses_varlen_attention

Rows = Mapping[int, tuple[int, int]]
"""By mixture layer: rows that a rank has for the experts in a microbatch, and rows that reach the experts it holds."""


@dataclass(frozen=True)
class Saved:
    """Bytes that a stage keeps for one microbatch."""

    whole: int
    """Between its forward and its backward pass."""
    deferred: int
    """Between the two parts of a backward pass that is split: inputs and gradients of products, for the weights."""
    again: int
    """What the layer that is computed again makes more for a moment."""


def block(tape: Tape, x: str, layer: int, rows: Rows | None) -> str:
    """One layer; gives the name of what it adds to the stream."""
    place, m = tape.place, tape.place.run.model
    piece = place.tokens // place.sizes["tensor"]
    centered = m.norm == "layernorm"
    with tape.part("block", x):
        entered = norm(tape, x, "attention norm", piece, m.hidden, centered=centered)
        attention(tape, gathered(tape, entered, "attention input"))
        middle = tape.make("middle", piece * m.hidden)
        entered = norm(tape, middle, "ffn norm", piece, m.hidden, centered=centered)
        if place.routed(layer):
            with tape.part("ffn", entered):
                mixture(tape, entered, rows[layer] if rows else None)
        else:
            whole = gathered(tape, entered, "ffn input")
            with tape.part("ffn", whole):  # gathered before it begins, so not again
                feed_forward(tape, whole, "ffn", m.ffn)
    return tape.make("out", piece * m.hidden)


def saved(place: Place, stage: Stage, rows: Rows | None = None) -> Saved:
    """What a stage saves for the backward pass of one microbatch."""
    run, m, t = place.run, place.run.model, place.sizes["tensor"]
    tape = Tape(place)
    x = tape.make("input", place.tokens // t * m.hidden)
    if not stage.first:
        tape.keep(x)
    elif t > 1:
        tape.own("embedding rows", place.tokens, INTEGER)
        tape.own("embedding known", place.tokens, 1)
    if m.position == "rotary" and stage.layers:
        width = m.rope_dim if m.attention == "latent" else m.head_dim
        tape.own("rotation", 2 * run.train.seq_len // run.layout.context * width, place.wide)
    more: int | Fraction = 0
    for layer, again in repeated(place, stage).items():
        tape.prefix, tape.again = f"{layer} ", again
        if again:
            more = max(more, _made_again(tape, x, layer, rows))
        x = block(tape, x, layer, rows)
        mask = 0 < m.sliding_window < run.train.seq_len and not uses_varlen_attention(run, gpu=place.fused)
        if again & {"block", "attention"} and run.layout.context == 1 and mask:
            tape.sizes["mask"] = run.train.seq_len**2
            tape.keep("mask")
    tape.prefix, tape.again = "", frozenset()
    deferred = sum(tape.sizes[name] + size for name, size in tape.products.items())
    if any(place.routed(layer) for layer in stage.layers):
        tape.own("auxiliary losses", 3, place.wide)
    if stage.last:
        loss(tape, x)
    else:
        tape.keep(x)
    return Saved(round(tape.total), round(deferred), round(more))


def _made_again(tape: Tape, x: str, layer: int, rows: Rows | None) -> int | Fraction:
    """What a layer keeps when nothing is computed again, over what it keeps so."""
    sizes = []
    for again in (frozenset[str](), tape.again):
        alone = replace(tape, sizes={x: 0}, kept=set(), products={}, again=again)
        block(alone, x, layer, rows)
        sizes.append(alone.total)
    return sizes[0] - sizes[1]


def repeated(place: Place, stage: Stage) -> dict[int, frozenset[str]]:
    """The layers of a stage, each with the parts of it that are computed again."""
    lay, found = place.run.layout, dict(place.layers())
    norms = lay.recompute == "operations" and "norm" in lay.recompute_operations
    with_norms = stage.layers[:: lay.recompute_every] if norms else ()
    return {layer: found[layer] | ({"norm"} if layer in with_norms else set()) for layer in stage.layers}


def loss(tape: Tape, x: str) -> None:
    """The end of the network: norm, head and cross-entropy."""
    place, m, t = tape.place, tape.place.run.model, tape.place.sizes["tensor"]
    rows = next(weight.shape[0] for weight in place.outer_weights(place.stages[-1]) if weight.cut == 0)
    entered = norm(tape, x, "norm", place.tokens // t, m.hidden, centered=m.norm == "layernorm")
    if place.chunked:  # its gradients are made at once, those of its input and of the head's matrix
        tape.own("gradient of the head's input", place.tokens * m.hidden)
        tape.own("gradient of the head", rows * m.hidden, place.wide)
        tape.own("loss", 1, place.wide)
        return
    linear(tape, gathered(tape, entered, "head input"), "logits", place.tokens, rows, m.hidden)
    tape.own("probabilities", place.tokens * rows, place.wide)
    tape.own("loss", 2 if t == 1 else 1, place.wide)
    if t > 1:
        tape.own("target rows", place.tokens, INTEGER)
        tape.own("targets mine and counted", 2 * place.tokens, 1)
