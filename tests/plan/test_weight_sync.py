"""Weights on their way from a trainer's layout to its engines': every rank gets every number that its part of an engine holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from shardwise.plan.serving.rollouts import own_weight_bytes, plan_rollouts
from shardwise.plan.serving.weight_sync import WeightSync, made_box, needed, rollout_layout
from shardwise.run import Run, UserError, run_from_dict
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.parameters import find_parameter
from shardwise.run.ranks.boxes import Box
from shardwise.run.ranks.coordinates import RankCoordinates

DENSE = dict(layers=4, hidden=64, heads=4, kv_heads=2, vocab=263, ffn=128)
EXPERTS = DENSE | dict(experts=4, experts_per_token=2, expert_ffn=64, shared_experts=1)


def made(model: dict[str, Any], layout: dict[str, Any], **more: Any) -> Run:
    answers = dict(kind="grpo", rewards=["r.py:f"], group=2, completion_tokens=8) | more.pop("objective", {})
    train = dict(global_batch=16, seq_len=32, dtype="float32", device="cpu", microbatch=1)
    return run_from_dict(dict(model=model, layout=layout, train=train, objective=answers) | more)


def drawn(draw: random.Random) -> Run:
    """A legal run on a drawn layout of up to 16 ranks."""
    while True:
        layout: dict[str, Any] = {
            axis: draw.choice([1, 1, 2, 4]) for axis in ("replicate", "shard", "context", "tensor", "pipeline")
        }
        experts = draw.random() < 0.5
        if experts:
            layout |= dict(expert=draw.choice([1, 2, 4]), expert_tensor=draw.random() < 0.5)
        layout["schedule"] = draw.choice(["1f1b", "interleaved", "zb-v", "dualpipe"])
        kind = draw.choice(["none", "lora", "dora", "qlora"])
        adapter = dict(kind=kind, rank=2, double_quantization=draw.random() < 0.5)
        try:
            run = made(
                EXPERTS if experts else DENSE | dict(tied_embeddings=draw.random() < 0.5), layout, adapter=adapter
            )
        except UserError:
            continue
        if 2 <= run.layout.world <= 16:
            return run


def cut(values: np.ndarray, box: Box) -> np.ndarray:
    return values[tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))]


@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first", "zb-v"])
def test_stages_of_a_pipeline_of_one_rank_are_all_its_own(schedule: str) -> None:
    run = made(DENSE, dict(shard=2, schedule=schedule, chunks=2))
    assert plan_rollouts(run, 1.0).as_dict()
    assert {WeightSync(run, 0).home(name) for name in needed(run, 0)} == {0}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(12))
def test_every_rank_gets_what_its_engine_holds(seed: int) -> None:
    """Played for all ranks, each with nothing but what it trains. What is sent is what is received, and as the plan says."""
    run = drawn(random.Random(seed))
    lay, members = run.layout, WeightSync(run, 0).members
    plans = {rank: WeightSync(run, rank) for rank in members}
    sent, received = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
    for name in needed(run):
        for part, wanted in plans[members[0]].parts(name):
            entry = find_parameter(run.model, part, run.adapter)
            whole = np.arange(entry.numel).reshape(entry.shape)
            moves = {rank: plans[rank].moves(part, wanted) for rank in members}
            width = DTYPE_BYTES[entry.dtype] if entry.dtype else 4
            for rank, box in wanted.items():
                into = np.full(box.size, -1)
                for source, common in moves[rank].received.items():
                    held = moves[source].held
                    assert held is not None
                    assert moves[source].sent[rank] == common
                    cut(into, common.within(box))[...] = cut(cut(whole, held), common.within(held))
                    if source != rank:
                        assert moves[rank].travels
                        received[rank] += common.numel * width
                        sent[source] += common.numel * width
                assert (into == cut(whole, box)).all(), (name, part)
            for box, holders in plans[members[0]].held(part).items():  # and who trains it is who has it
                for rank in holders:
                    at = RankCoordinates(lay, rank)
                    assert at.index("pipeline") == plans[rank].home(part)
                    assert moves[rank].held == box
        for rank in members:
            box = plans[rank].box(name, rank)
            if box is not None and box.numel:
                around = made_box(run, name, box)
                assert box.common(around) == box
    for rank in members:
        assert plans[rank].sent_bytes(DTYPE_BYTES, 4) == sent[rank]
        assert sum(plans[rank].received_bytes(DTYPE_BYTES, 4)) == received[rank]


@pytest.mark.parametrize(
    ("model", "layout", "more", "engines"),
    [
        (DENSE, dict(tensor=2, shard=2), {}, (2, 2, 1, 1)),
        (DENSE, dict(tensor=2, pipeline=2, context=2), {}, (2, 2, 2, 1)),
        (EXPERTS, dict(shard=4, expert=2), {}, (2, 1, 1, 2)),
        (EXPERTS | dict(expert_ffn=63, shared_experts=0), dict(tensor=2), {}, (1, 2, 1, 2)),
        (DENSE, dict(pipeline=4, shard=1), dict(objective=dict(asynchronous=True)), (1, 1, 4, 1)),
        (EXPERTS, dict(tensor=2, shard=2, expert=2), dict(serve=dict(invariant=True)), (1, 2, 1, 4)),
    ],
    ids=["tensor", "pipeline", "experts", "whole experts", "asynchronous", "invariant"],
)
def test_engines_are_cut_as_the_trainer_is(
    model: dict[str, Any], layout: dict[str, Any], more: dict[str, Any], engines: tuple[int, ...]
) -> None:
    found = rollout_layout(made(model, layout, **more))
    assert (found.replicate, found.tensor, found.pipeline, found.expert) == engines


def test_a_large_network_fits_whose_parts_alone_do() -> None:
    """70B on eight devices: each holds an eighth of the matrices for its answers, and not 141 GB."""
    answers = dict(kind="grpo", rewards=["r.py:f"], group=8, completion_tokens=512)
    run = run_from_dict(
        dict(
            model=dict(preset="llama3-70b"), layout=dict(tensor=8), adapter=dict(kind="lora", rank=16), objective=answers,
            train=dict(global_batch=64, microbatch=1, seq_len=1024, dtype="bfloat16", device="cuda"),
            cluster=dict(chip="h200"),
        )
    )  # fmt: skip
    h, f, kv, vocab = 8192, 28672, 1024, 128256
    matrices = 80 * (2 * h * h + 2 * kv * h + 3 * h * f) + 2 * vocab * h
    norms = 80 * 2 * h + h
    assert own_weight_bytes(run, gpu=True) == 2 * (matrices // 8 + norms)
    found = plan_rollouts(run, 1.0)
    assert found.fits
    assert found.weight_sync_seconds == 0.0  # its ranks train what they answer with
    shards = run_from_dict(
        dict(
            model=dict(preset="llama3-70b"), layout=dict(tensor=8, shard=4), objective=answers,
            train=dict(global_batch=64, microbatch=1, seq_len=1024, dtype="bfloat16", device="cuda"),
            cluster=dict(chip="h200", nodes=4, devices_per_node=8),
        )
    )  # fmt: skip
    missing = 2 * (matrices + 8 * norms) / 8 * 3 / 4  # of which a rank has a quarter already
    assert sum(WeightSync(shards, 0).received_bytes(DTYPE_BYTES, 2)) == pytest.approx(missing, rel=1e-6)
    assert missing / 900e9 < plan_rollouts(shards, 1.0).weight_sync_seconds < missing / 10e9
