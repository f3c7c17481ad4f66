"""The tensors that an MoE layer saves for the backward pass: of its router, of the rows of its experts, and of their adapters."""

from __future__ import annotations

from fractions import Fraction

from shardwise.plan.trainer.rows import rows_to_experts
from shardwise.plan.trainer.saved_layers import feed_forward, gathered
from shardwise.plan.trainer.tape import Tape
from shardwise.run.dtypes import INT32, INT64


def moe(tape: Tape, x: str, rows: tuple[int, int] | None) -> None:
    """Router, experts and shared experts."""
    planned, m, lay = tape.planned, tape.planned.run.model, tape.planned.run.layout
    router(tape, x)
    # With expert tensor parallelism each tensor rank has the tokens of all tensor ranks.
    tokens = planned.local_tokens * (lay.tensor if lay.expert_tensor else 1)
    chosen = tokens * m.experts_per_token
    low = tape.low_precision and not tape.fused_dispatch
    tape.save_new("weights", chosen, planned.width if low else planned.high_width)
    dispatched, arrived = rows or rows_to_experts(planned)
    if tape.fused_dispatch and lay.expert == 1:
        # The upper bound: only the device knows how many rows the experts' capacity leaves.
        dispatched = arrived = chosen
    experts(tape, dispatched, arrived)
    if tape.fused_dispatch:
        tape.save_new("places", chosen, INT32)
        tape.save_new("results", dispatched * m.hidden)
    else:
        if m.expert_capacity:  # index_copy saves its source, though only the shape is needed
            tape.save_new("combined", dispatched * m.hidden)
        else:
            tape.save_new("inverse order", chosen, INT64)
        tape.save_new("results", chosen * m.hidden)
    if m.shared_experts:
        feed_forward(tape, gathered(tape, x, "shared input"), "ffn.shared")


def router(tape: Tape, x: str) -> None:
    """The router's scores, choices and two auxiliary losses."""
    planned, m, high = tape.planned, tape.planned.run.model, tape.planned.high_width
    tokens, micro, k = planned.local_tokens, planned.run.train.microbatch, m.experts_per_token
    learns = tape.parameters["ffn.router.weight"].learns
    if tape.low_precision and not tape.fused_gemms:
        if learns:
            tape.save_new("router input", tokens * m.hidden, high)
        if planned.is_sharded or not learns:  # all-gathered or held in 16 bits, and cast back
            tape.save_new("router weight", tape.parameters["ffn.router.weight"].numel, high)
    elif learns:
        tape.save(x)
    tape.save_new("router logits", tokens * m.experts, high)
    tape.save_new("router scores", tokens * m.experts, high)
    tape.save_new("router log sums", tokens, high)
    tape.save_new("chosen", tokens * k, INT64)
    tape.save_new("loads", micro * m.experts, high)
    if m.router == "sigmoid":
        tape.save_new("score sums", tokens, high)
    if m.router_normalize:
        tape.save_new("chosen scores", tokens * k, high)
        tape.save_new("chosen sums", tokens, high)
    if m.expert_capacity:  # made for the whole sequence; the saved slice keeps all of it
        tape.save_new("within capacity", micro * planned.run.train.seq_len * k, 1)


def experts(tape: Tape, dispatched: int | Fraction, arrived: int | Fraction) -> None:
    """The rows' way to the experts and through them."""
    planned, lay, fused = tape.planned, tape.planned.run.layout, tape.fused_dispatch
    adapter = planned.run.adapter
    weights = {name.removeprefix("ffn.experts."): p for name, p in tape.parameters.items() if p.entry.routed}
    learned = sum(p.numel for p in weights.values() if p.learns and p.entry.multiplied)
    count, width, hidden = weights["gate"].shape
    hidden *= weights["gate"].entry.packed
    if not fused:
        tape.save_new("expert order", dispatched, INT64)
    if lay.expert > 1:
        tape.save_new("arrived order", arrived if fused else 2 * arrived, INT32 if fused else INT64)
    # Experts that no other rank has a shard of are not all-gathered, so no all-gather casts them.
    alone = planned.size("expert_shard") == lay.sharding_replicas == 1 and not lay.offload
    if tape.low_precision and (alone or not planned.is_sharded):
        tape.save_new("expert weights", learned)
    if tape.fused_gemms and hidden % 8 == width % 8 == 0:  # one grouped GEMM, which reads where each expert's rows end
        tape.save_new("expert ends", count, INT32)
    tape.save_new("expert gate, up and function", 3 * arrived * width)
    inputs = dict(gate=("expert rows", hidden), up=("expert rows", hidden), down=("expert inner", width))
    for part, (name, inner) in inputs.items():
        low_rank = weights.get(f"lora.{part}_A")
        if weights[part].learns or (low_rank is not None and not adapter.dropout):
            tape.save_new(name, arrived * inner)
        if low_rank is None:
            continue
        if adapter.dropout:  # a mask of one bit an element, and the masked input
            tape.save_new(f"expert {part} mask", -(-arrived * inner // 8), 1)
            tape.save_new(f"expert {part} dropout", arrived * inner)
        tape.save_new(f"expert {part} low rank", arrived * low_rank.shape[1])
        if adapter.kind == "dora":  # the sum, its factors, and the row norms they are divided by
            magnitude = weights[f"lora.{part}_magnitude"]
            tape.save_new(f"expert {part} sum", arrived * magnitude.shape[1])
            tape.save_new(f"expert {part} factors", magnitude.numel)
            tape.save_new(f"expert {part} lengths", magnitude.numel, planned.high_width)
    rescaled = adapter.kind == "dora" and any(p.entry.adapted for p in weights.values())
    if adapter.kind == "qlora" or rescaled:  # to find the rows of each expert again
        tape.save_new("expert counts", count, INT64)
