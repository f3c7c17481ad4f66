"""Memory is what the planner says: what each rank holds during a step, counted by the lifetime of real tensors, equals
`shardwise.plan.trainer.state`, from model and layout alone. Where it depends on the routing of tokens, the planner
is told how many rows each rank's experts got."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.measure.dry import dry_rank
from shardwise.measure.memory import Storages, measure_memory
from shardwise.measure.verify import random_batch
from shardwise.model.moe import MoE
from shardwise.model.transformer import Block
from shardwise.parallel import apply as apply_module
from shardwise.parallel import shard as shard_module
from shardwise.plan.plan import plan
from shardwise.plan.trainer import rank as rank_module
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.state import activations, gathered, peak_gradients, saved_activations, state_bytes
from shardwise.run import Run, run_from_dict
from shardwise.run.derive import keeps_compute_copies
from shardwise.train.step import TrainState

Routed = dict[
    int, list[tuple[int, int]]
]  # for each layer, microbatch by microbatch: rows sent to experts, rows arrived


def note_rows(train_state: TrainState) -> Routed:
    """Let the mixtures of a trainee write down the rows they send and get, passes that are repeated left out."""
    routed: Routed = {}

    def follow(layer: int, mixture: MoE) -> None:
        run_experts, sent = mixture.run_experts, [0]

        def noted(rows: Tensor, counts: Tensor) -> Tensor:
            sent[0] = len(rows)
            return run_experts(rows, counts)

        def arrived(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if mixture.router.counting:
                routed.setdefault(layer, []).append((sent[0], len(args[0])))

        mixture.run_experts = noted  # type: ignore[method-assign]
        mixture.experts.register_forward_pre_hook(arrived)

    for model in train_state.parallel.models:
        for layer, block in model.layers.items():
            assert isinstance(block, Block)
            if isinstance(block.ffn, MoE):
                follow(int(layer), block.ffn)
    return routed


def measured_step(rank: int, run: Run) -> tuple[dict[str, Any], Routed]:
    """Bytes of a rank in one step, and how its tokens were routed."""
    train_state = TrainState(run)
    routed = note_rows(train_state)
    rows = train_state.samples(np.arange(run.train.global_batch))
    return measure_memory(train_state, cases.take(cases.batch(0, False, run.train.global_batch), rows)), routed


NARROW = dict(dtype="bfloat16")
LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *[(model, dict(), more) for model in cases.MODELS for more in ({}, NARROW)],
    ("dense", dict(), dict(dtype="float32")),
    ("dense", dict(replicate=2), NARROW),
    ("dense", dict(replicate=2), NARROW | dict(reduce_dtype="bfloat16")),
    # Rows that do not divide are padded.
    ("dense", dict(shard=3, zero=2), dict(global_batch=6)),
    ("dense", dict(shard=2, zero=1), NARROW | dict(reduce_dtype="bfloat16")),
    ("dense", dict(shard=4, zero=3), NARROW | dict(microbatch=1)),
    ("dense", dict(replicate=2, shard=2, zero=2), dict(dtype="float32")),
    ("dense", dict(tensor=2, async_tensor=True, shard=2), NARROW),
    # More ranks than key/value heads.
    ("dense", dict(tensor=4), NARROW),
    ("latent", dict(tensor=4), {}),
    ("dense", dict(replicate=2, tensor=2), {}),
    ("parallel", dict(tensor=2, shard=2), NARROW),
    ("parallel", dict(recompute="operations", recompute_operations=("norm", "ffn")), NARROW),
    ("tied", dict(tensor=2, pipeline=2), NARROW),
    ("tied", dict(pipeline=2, schedule="zb-v"), {}),
    ("dense", dict(pipeline=2, shard=2, schedule="zb-v", zero=2), {}),
    *[("dense", dict(context=2, tensor=2, context_method=method), NARROW) for method in ("ring", "ulysses", "gather")],
    *[("latent", dict(context=2, context_method=method), {}) for method in ("ring", "ulysses", "gather")],
    ("dense", dict(context=4, context_method="ulysses"), {}),
    ("window", dict(context=2, context_method="gather", recompute="attention"), {}),
    ("window", dict(recompute="attention"), NARROW),
    ("dense", dict(recompute="full", recompute_every=3), NARROW),
    ("latent", dict(pipeline=2, recompute="full"), {}),
    ("dense", dict(tensor=2, recompute="operations", recompute_operations=("ffn",)), {}),
    ("latent", dict(recompute="operations", recompute_operations=("norm", "attention")), NARROW),
    ("mixture", dict(shard=4, expert=2), NARROW | dict(microbatch=1)),
    ("mixture", dict(tensor=2), NARROW),
    ("mixture", dict(tensor=2, shard=2, expert=2, expert_tensor=True), dict(optimizer="muon")),
    ("softmax", dict(replicate=2, shard=2, expert=2), NARROW),
    ("softmax", dict(tensor=2, expert_tensor=True, recompute="full", recompute_every=2), NARROW),
    ("capacity", dict(context=2, expert=2), {}),
    (
        "capacity",
        dict(shard=2, tensor=2, expert=2, recompute="operations", recompute_operations=("attention", "norm", "ffn")),
        {},
    ),
    ("mixture", dict(pipeline=2, shard=2, expert=2, schedule="zb-h1"), {}),
    ("mixture", dict(context=2, tensor=2, expert=2, shard=2), NARROW),
    *cases.FEWER_EXPERTS_THAN_RANKS,
    ("few", dict(shard=4, expert=2), NARROW | dict(microbatch=1)),
    ("few", dict(shard=4, expert=2), dict(optimizer="muon")),
]


def _saves_as_planned(run: Run, rank: int, counted: dict[str, Any], routed: dict[int, Any]) -> bool:
    for stage, sizes in counted["saved"].items():
        for microbatch, size in enumerate(sizes):
            rows = {layer: calls[microbatch] for layer, calls in routed.items()}
            if saved_activations(run, rank, rows)[stage] != pytest.approx(size, rel=0.01):
                return False
    return True


@pytest.mark.parametrize(("model", "layout", "more"), LAYOUTS, ids=str)
def test_a_rank_holds_what_the_plan_says(
    ranks: RankPool, model: str, layout: dict[str, Any], more: dict[str, Any]
) -> None:
    run = cases.make_run(model, layout, **more)
    measured = ranks.run(run.layout.world, measured_step, run)
    if any(not _saves_as_planned(run, rank, *one) for rank, one in enumerate(measured)):
        # On a busy machine a message's buffer may outlive it for a moment.
        measured = ranks.run(run.layout.world, measured_step, run)
    for rank, (counted, routed) in enumerate(measured):
        planned = state_bytes(run, rank) | dict(gathered=gathered(run, rank), unreduced=peak_gradients(run, rank))
        assert {owner: counted[owner] for owner in planned} == planned, f"rank {rank}"
        assert _saves_as_planned(run, rank, counted, routed), f"rank {rank}"
        if not run.model.experts:
            # Between the two parts of a split backward pass gradients may be views of larger ones.
            near = 0.05 if PlannedRank(run, rank).splits_backward else 0.01
            assert activations(run, rank) == pytest.approx(counted["activations"], rel=near), f"rank {rank}"


@pytest.mark.parametrize("model", ["dense", "tied", "latent", "mixture"])
def test_copies_that_are_kept_count_where_they_stand(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: copies with the parameters, gradients in 16 bits, and nothing of a cast among what is saved."""
    for where in (apply_module, rank_module):
        monkeypatch.setattr(where, "keeps_compute_copies", lambda run, gpu: keeps_compute_copies(run, gpu=True))
    run = cases.make_run(model, {}, **NARROW, microbatch=0)
    assert PlannedRank(run, 0).keeps_compute_copies
    counted, routed = measured_step(0, run)
    planned = state_bytes(run, 0)
    assert {owner: counted[owner] for owner in planned} == planned
    monkeypatch.undo()
    before = state_bytes(run, 0)
    assert planned["parameters"] > before["parameters"]
    assert planned["parameters"] + planned["gradients"] == before["parameters"] + before["gradients"]
    rows = {layer: calls[0] for layer, calls in routed.items()}
    casts = planned["parameters"] - before["parameters"]
    assert saved_activations(run, 0, rows)[0] - casts == pytest.approx(counted["saved"][0][0], rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_microbatches_in_flight(ranks: RankPool, schedule: str) -> None:
    run = cases.make_run("dense", dict(pipeline=2, schedule=schedule), layers=8, microbatch=1)
    for rank, (counted, _) in enumerate(ranks.run(2, measured_step, run)):
        assert activations(run, rank) == pytest.approx(counted["activations"], rel=0.01), f"rank {rank}"


def test_tensors_without_data_are_counted_alike() -> None:
    run = cases.make_run("dense", dict(recompute="attention"), **NARROW)
    real = measured_step(0, run)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert measured_step(0, run) == real


def test_plan_gives_these_numbers() -> None:
    run = cases.make_run("tied", dict(pipeline=2, shard=2, zero=1), **NARROW)
    for stage, owners in enumerate(plan(run).account.memory.ranks):
        own = state_bytes(run, 2 * stage) | dict(
            activations=activations(run, 2 * stage), gathered=gathered(run, 2 * stage)
        )
        own["gradients"] = peak_gradients(run, 2 * stage)
        assert {owner: owners[owner] for owner in own} == own


def test_gradients_cut_along_another_dimension_are_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers dealt out expert by expert and in pieces of each: at its fullest a rank holds one matrix more."""
    model = dict(layers=2, hidden=64, heads=4, ffn=64, vocab=61, experts=8, experts_per_token=1, expert_ffn=512)
    train = dict(seq_len=32, global_batch=16, microbatch=1, dtype="bfloat16", device="cpu")
    run = run_from_dict(dict(model=model, layout=dict(shard=8), train=train))
    peaks, buffers = [], []
    for dim in (0, 1):
        for where in (shard_module, rank_module):
            monkeypatch.setattr(where, "shard_dim", lambda shape, ranks, dim=dim: dim)
        with dry_rank(run, 0) as train_state:
            batch = random_batch(run, 0)
            train_state.train_step(batch)
            peaks.append(measure_memory(train_state, batch)["peak"])
        buffers.append(plan(run).account.memory.ranks[0]["buffers"])
    assert peaks[1] - peaks[0] == buffers[1] - buffers[0] == 8 * 512 * 64 * 2


ON_GPU = [
    ("dense", "bfloat16", 373992),
    ("dense", "float32", 779272),
    ("tied", "bfloat16", 270312),
    ("tied", "float32", 593416),
    ("latent", "bfloat16", 618792),
    ("latent", "float32", 749608),
    ("window", "bfloat16", 374048),
    ("window", "float32", 779272),
]
"""Bytes a microbatch of two layers saved on an H200 with PyTorch 2.11, counted by `measure_memory`; for mixtures see
`tests/cuda/test_experts.py`."""


@pytest.mark.parametrize(("model", "dtype", "counted"), ON_GPU)
def test_kernels_of_a_gpu_keep_what_was_counted_there(model: str, dtype: str, counted: int) -> None:
    run = cases.make_run(model, {}, layers=2, device="cuda", dtype=dtype, loss="plain")
    assert saved_activations(run, 0) == {0: counted}


def test_storages_are_counted_once_and_forgotten() -> None:
    def work() -> Tensor:
        whole = torch.ones(100)  # 400 bytes
        other = whole + 1
        return other[:10]  # keeps all of `other`

    with Storages() as storages:
        kept = work()
        assert storages.now == 400
        assert storages.peak == 800
        kept.untyped_storage().resize_(0)
        assert storages.now == 0
        del kept
    assert not storages.alive
