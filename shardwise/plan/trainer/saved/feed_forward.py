"""What feed-forward layers save, dense ones and mixtures: router, rows on their way to experts, and the experts."""

from __future__ import annotations

from fractions import Fraction

from shardwise.plan.trainer.saved.tape import PLACE, Tape, gathered, linear
from shardwise.plan.trainer.traffic import INTEGER, kept_rows


def feed_forward(tape: Tape, x: str, name: str, width: int) -> None:
    """Two matrices and the function between them, or three."""
    m, t, tokens = tape.place.run.model, tape.place.sizes["tensor"], tape.place.tokens
    width //= t
    if m.gated:
        gate = linear(tape, x, f"{name} gate", tokens, width, m.hidden, edge=True)
        up = linear(tape, x, f"{name} up", tokens, width, m.hidden)
        function = tape.make(f"{name} function", tokens * width)
        tape.keep(gate, up, function)
    else:
        up = linear(tape, x, f"{name} up", tokens, width, m.hidden, edge=True)
        if m.activation == "gelu":
            tape.keep(up)
        elif m.activation == "relu2":
            tape.own(f"{name} positive", tokens * width)
    inner = tape.make(f"{name} inner", tokens * width)
    linear(tape, inner, f"{name} down", tokens, m.hidden, width, edge=True)


def mixture(tape: Tape, x: str, rows: tuple[int, int] | None) -> None:
    """Router, experts and shared experts."""
    place = tape.place
    m, lay, wide = place.run.model, place.run.layout, place.wide
    tokens = place.tokens // lay.tensor
    router(tape, x, tokens)
    # With expert tensor parallelism each rank has the tokens of all of them.
    tokens *= lay.tensor if lay.expert_tensor else 1
    chosen = tokens * m.experts_per_token
    tape.own("weights", chosen, place.width if tape.narrow and not tape.moves_rows else wide)
    sent, arrived = rows or (kept_rows(place), kept_rows(place))
    if tape.moves_rows:
        if lay.expert == 1:  # as many as there could be: how many an expert's capacity leaves, only the device knows
            sent = arrived = chosen
        experts(tape, sent, arrived)
        tape.own("places", chosen, PLACE)
        tape.own("results", sent * m.hidden)
    else:
        experts(tape, sent, arrived)
        _results(tape, sent, chosen)
    if m.shared_experts:
        feed_forward(tape, gathered(tape, x, "shared input"), "shared", m.shared_experts * m.expert_ffn)


def _results(tape: Tape, sent: int | Fraction, chosen: int) -> None:
    """What came from the experts, as plain operations bring it back."""
    m = tape.place.run.model
    if m.expert_capacity:  # PyTorch keeps what is laid among zeros, of which it needs the shape alone
        tape.own("done", sent * m.hidden)
    else:
        tape.own("way back", chosen, INTEGER)
    tape.own("results", chosen * m.hidden)


def router(tape: Tape, x: str, tokens: int) -> None:
    """Scores, choices and the two losses beside."""
    place, m, wide = tape.place, tape.place.run.model, tape.place.wide
    micro, k = place.run.train.microbatch, m.experts_per_token
    if tape.narrow and not tape.in_parts:
        tape.own("router input", tokens * m.hidden, wide)
        if place.shared:  # gathered in 16 bits, and widened again
            tape.own("router weight", m.experts * m.hidden, wide)
    else:
        tape.keep(x)
    tape.own("router logits", tokens * m.experts, wide)
    tape.own("router scores", tokens * m.experts, wide)
    tape.own("router log sums", tokens, wide)
    tape.own("chosen", tokens * k, INTEGER)
    tape.own("loads", micro * m.experts, wide)
    if m.router == "sigmoid":
        tape.own("score sums", tokens, wide)
    if m.router_normalize:
        tape.own("chosen scores", tokens * k, wide)
        tape.own("chosen sums", tokens, wide)
    if m.expert_capacity:  # decided over the whole sequence, and a part of that
        tape.own("within capacity", micro * place.run.train.seq_len * k, 1)


def experts(tape: Tape, sent: int | Fraction, arrived: int | Fraction) -> None:
    """Rows to the experts and through them."""
    place, m, lay = tape.place, tape.place.run.model, tape.place.run.layout
    if not tape.moves_rows:
        tape.own("expert order", sent, INTEGER)
    if lay.expert > 1:
        tape.own("arrived order", arrived if tape.moves_rows else 2 * arrived, PLACE if tape.moves_rows else INTEGER)
    width = m.expert_ffn // (lay.tensor if lay.expert_tensor else 1)
    # Experts that no other rank holds a part of are not gathered, so not cast by it either.
    alone = place.sizes["expert_shard"] == place.sizes["replicate"] == 1 and not lay.offload
    if tape.casts or (tape.narrow and alone):
        tape.own("expert weights", 3 * m.experts // lay.expert * width * m.hidden)
    if tape.in_parts and m.hidden % 8 == width % 8 == 0:  # one kernel, which reads where each expert's rows end
        tape.own("expert ends", m.experts // lay.expert, PLACE)
    tape.own("expert rows", arrived * m.hidden)
    tape.own("expert gate, up, function and inner", 4 * arrived * width)
