"""A rank starts in the memory of its shards and one block, whatever the size of the model: counted without allocating anything, and
held against real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import cases
import pytest
from parallel_pool import RankPool

from shardwise.measure.counts.memory import Storages, parameters_of, unique_bytes
from shardwise.measure.dry import dry_rank
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


class StartMemory(NamedTuple):
    """Bytes of one rank."""

    shards: int
    """Of the parameters that it holds."""
    peak: int
    """The most that was allocated at once, these included."""


def start_memory(run: Run, rank: int) -> StartMemory:
    """What one rank of a run would allocate between nothing and a train state, without allocating it. On a CPU, and for parameters
    that are offloaded, this is memory of the host; on a GPU the same tensors are the device's."""
    run = replace(run, train=replace(run.train, device="cpu"))
    storages = Storages()
    with dry_rank(run, rank, storages) as train_state:
        return StartMemory(unique_bytes(parameters_of(train_state)), storages.peak)


def large_run(preset: str, **train: Any) -> Run:
    keys = dict(microbatch=1, global_batch=2048, dtype="bfloat16") | train
    overrides = [f"model.preset={preset}"]
    overrides += [f"train.{key}={value}" for key, value in keys.items()]
    overrides += [f"layout.{key}={value}" for key, value in LARGE_MODELS[preset].items()]
    return read_run(None, overrides)


@pytest.mark.parametrize(
    ("preset", "rank"),
    [
        ("llama3-405b", 0),
        ("deepseek-v3", -1),
        ("llama3-405b", -1),
        ("deepseek-v3", 0),
    ],
)
@pytest.mark.drawn(group="dry ranks")
def test_large_models_start_in_the_memory_of_their_shards(preset: str, rank: int) -> None:
    run = large_run(preset)
    memory = start_memory(run, rank % run.layout.world)
    assert memory.shards > 50 * 2**20  # so that the block counts
    assert memory.shards < memory.peak <= MOST * memory.shards


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (dict(zero=3, offload=True), dict(optimizer="muon")),
        (dict(zero=3), dict(fp8="rowwise")),
        (dict(zero=3), dict(optimizer="muon")),
        (dict(offload=True), dict()),
    ],
    ids=str,
)
@pytest.mark.drawn(group="dry ranks")
def test_so_do_other_ways_to_train_them(layout: dict[str, Any], train: dict[str, Any]) -> None:
    run = large_run("llama3-405b", **train)
    memory = start_memory(replace(run, layout=replace(run.layout, **layout)), 200)
    assert memory.shards < memory.peak <= MOST * memory.shards


def started(rank: int, run: Run, block: int) -> tuple[int, int]:
    with mock.patch.object(normal, "CPU_BLOCK", block), Storages() as storages:
        train_state = TrainState(run)
    return unique_bytes(parameters_of(train_state)), storages.peak


@pytest.mark.parametrize(("model", "layout"), [("mixture", dict(shard=2, expert=2)), ("tied", dict(tensor=2))], ids=str)
@pytest.mark.drawn(group="dry ranks")
def test_real_ranks_need_what_is_counted(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, model: str, layout: dict[str, Any]
) -> None:
    run = cases.make_run(model, layout, layers=2)
    block = 64  # of many in a matrix of these models
    monkeypatch.setattr(normal, "CPU_BLOCK", block)
    for rank, (shards, peak) in enumerate(ranks.run(2, started, run, block)):
        counted = start_memory(run, rank)
        assert shards == counted.shards
        assert 0 <= peak - counted.peak < 64  # PyTorch's device meshes, which a dry rank has before
