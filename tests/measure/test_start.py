"""A rank starts in the memory of its shards and one block, whatever the size of the model: counted without allocating anything, and
held against real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import cases
import pytest
from parallel_pool import RankPool

from shardwise.measure.memory import Storages, parameters_of, unique_bytes
from shardwise.measure.start import start_memory
from shardwise.model import normal
from shardwise.run import Run, read_run
from shardwise.train.step import TrainState

MOST = 1.3
LARGE_MODELS = {
    # Grattafiori et al. 2024, table 4: 8 x 16 x 128 GPUs.
    "llama3-405b": dict(tensor=8, pipeline=16, shard=128, zero=2, schedule="interleaved", chunks=8),
    # DeepSeek-V3 2024, section 3.2: 16 stages, 64 ranks for the experts, ZeRO-1.
    "deepseek-v3": dict(pipeline=16, shard=128, expert=64, zero=1, schedule="dualpipe-v"),
}


def large_run(preset: str, **train: Any) -> Run:
    keys = dict(microbatch=1, global_batch=2048, dtype="bfloat16") | train
    overrides = [f"model.preset={preset}"]
    overrides += [f"train.{key}={value}" for key, value in keys.items()]
    overrides += [f"layout.{key}={value}" for key, value in LARGE_MODELS[preset].items()]
    return read_run(None, overrides)


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("preset", LARGE_MODELS)
def test_large_models_start_in_the_memory_of_their_shards(preset: str, rank: int) -> None:
    run = large_run(preset)
    memory = start_memory(run, rank % run.layout.world)
    assert memory.shards > 50 * 2**20  # so that the block counts
    assert memory.shards < memory.peak <= MOST * memory.shards


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (dict(zero=3), dict(fp8="rowwise")),
        (dict(zero=3), dict(optimizer="muon")),
        (dict(offload=True), dict()),
    ],
    ids=str,
)
def test_so_do_other_ways_to_train_them(layout: dict[str, Any], train: dict[str, Any]) -> None:
    run = large_run("llama3-405b", **train)
    memory = start_memory(replace(run, layout=replace(run.layout, **layout)), 200)
    assert memory.shards < memory.peak <= MOST * memory.shards


def started(rank: int, run: Run, block: int) -> tuple[int, int]:
    with mock.patch.object(normal, "CPU_BLOCK", block), Storages() as storages:
        train_state = TrainState(run)
    return unique_bytes(parameters_of(train_state)), storages.peak


@pytest.mark.parametrize(("model", "layout"), [("mixture", dict(shard=2, expert=2)), ("tied", dict(tensor=2))], ids=str)
def test_real_ranks_need_what_is_counted(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, model: str, layout: dict[str, Any]
) -> None:
    run = cases.make_run(model, layout)
    block = 64  # of many in a matrix of these models
    monkeypatch.setattr(normal, "CPU_BLOCK", block)
    for rank, (shards, peak) in enumerate(ranks.run(2, started, run, block)):
        counted = start_memory(run, rank)
        assert shards == counted.shards
        assert 0 <= peak - counted.peak < 64  # PyTorch's device meshes, which a dry rank has before
