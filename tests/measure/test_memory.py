"""How memory is counted, by the lifetime of real tensors, and what the planner says of it where this machine cannot run: kept
copies and kernels of a GPU. That ranks hold what the planner says is in tests/parallel/test_layouts.py."""

from __future__ import annotations

import hashlib
import sys
import threading
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest
import torch
from observed import Routed, note_rows, saved_activations
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.measure.counts.memory import Storages, _other_threads_run, measure_memory
from shardwise.measure.dry import dry_rank
from shardwise.measure.verify import random_batch
from shardwise.parallel import apply as apply_module
from shardwise.parallel import shard as shard_module
from shardwise.plan.plan import plan
from shardwise.plan.trainer import memory as memory_module
from shardwise.plan.trainer import rank as rank_module
from shardwise.plan.trainer.rank import PlannedRank, planned_rank
from shardwise.plan.trainer.state import activations, gathered, peak_gradients, state_bytes
from shardwise.run import Run, run_from_dict
from shardwise.run.derive import keeps_compute_copies
from shardwise.train.step import TrainState


def measured_step(rank: int, run: Run) -> tuple[dict[str, Any], Routed]:
    """Bytes of a rank in one step, and how its tokens were routed."""
    train_state = TrainState(run)
    routed = note_rows(train_state)
    rows = train_state.samples(np.arange(run.train.global_batch))
    return measure_memory(train_state, cases.take(cases.batch(0, False, run.train.global_batch), rows)), routed


NARROW = dict(dtype="bfloat16")


@pytest.mark.parametrize("model", ["dense", "tied", "latent", "mixture"])
@pytest.mark.drawn(group="memory")
def test_copies_that_are_kept_count_where_they_stand(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: copies with the parameters, gradients in 16 bits, and nothing of a cast among what is saved."""
    for where in (apply_module, rank_module):
        monkeypatch.setattr(where, "keeps_compute_copies", lambda run, gpu: keeps_compute_copies(run, gpu=True))
    run = cases.make_run(model, {}, layers=2, **NARROW, microbatch=0)
    assert PlannedRank(run, 0).keeps_compute_copies
    counted, routed = measured_step(0, run)
    planned = state_bytes(run, 0)
    assert {owner: counted[owner] for owner in planned} == planned
    monkeypatch.undo()
    planned_rank.cache_clear()
    before = state_bytes(run, 0)
    assert planned["parameters"] > before["parameters"]
    assert planned["parameters"] + planned["gradients"] == before["parameters"] + before["gradients"]
    rows = {layer: calls[0] for layer, calls in routed.items()}
    casts = planned["parameters"] - before["parameters"]
    assert saved_activations(run, 0, rows)[0] - casts == pytest.approx(counted["saved"][0][0], rel=0.01)


@pytest.mark.drawn(group="memory")
def test_tensors_without_data_are_counted_alike() -> None:
    run = cases.make_run("dense", dict(recompute="attention"), layers=2, **NARROW)
    real = measured_step(0, run)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert measured_step(0, run) == real


def test_plan_gives_these_numbers() -> None:
    run = cases.make_run("tied", dict(pipeline=2, shard=2, zero=1), **NARROW)
    for stage, owners in enumerate(plan(run).account.memory.ranks):
        place, own = planned_rank(run, 2 * stage), state_bytes(run, 2 * stage)
        own |= dict(activations=activations(place), gathered=gathered(place))
        own["gradients"] = peak_gradients(place, own["gradients"])
        assert {owner: owners[owner] for owner in own} == own


@pytest.mark.drawn(group="memory")
def test_gradients_cut_along_another_dimension_are_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers dealt out expert by expert and in pieces of each: at its fullest a rank holds one matrix more."""
    model = dict(layers=1, hidden=64, heads=4, ffn=64, vocab=61, experts=8, experts_per_token=1, expert_ffn=512)
    train = dict(seq_len=32, global_batch=8, microbatch=1, dtype="bfloat16", device="cpu")
    run = run_from_dict(dict(model=model, layout=dict(shard=8), train=train))
    peaks, buffers = [], []
    for dim in (0, 1):
        for where in (shard_module, rank_module):
            monkeypatch.setattr(where, "shard_dim", lambda shape, ranks, dim=dim: dim)
        with dry_rank(run, 0) as train_state:
            batch = random_batch(run, 0)
            train_state.train_step(batch)
            peaks.append(measure_memory(train_state, batch)["peak"])
        memory_module._standing.cache_clear()  # it may know the other cut
        buffers.append(plan(run).account.memory.ranks[0]["buffers"])
    memory_module._standing.cache_clear()
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
`tests/cuda/test_moe_cuda.py`."""


@pytest.mark.parametrize(("model", "dtype", "counted"), ON_GPU)
def test_kernels_of_a_gpu_keep_what_was_counted_there(model: str, dtype: str, counted: int) -> None:
    run = cases.make_run(model, {}, layers=2, device="cuda", dtype=dtype, loss="plain")
    run = replace(run, model=replace(run.model, position_offset=0))  # as it was when it was counted
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_that_has_something_to_do_is_waited_for() -> None:
    """However long other programs keep it from the processor: it may hold a tensor."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            hashlib.sha256(bytes(2**24)).digest()  # without the interpreter's lock

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert any(_other_threads_run() for _ in range(1000))
    finally:
        over.set()
        thread.join()
    assert not all(_other_threads_run() for _ in range(1000))
