"""GRPO on a GPU draws the answers that one process draws on a CPU, and learns the same from them: alone, and with engines cut over
ranks. Those share the GPU, over gloo, or have one each, over NCCL, where steps of the engines are recorded."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_pool import RankPool

sys.path.insert(0, str(Path(__file__).parent.parent / "tune"))
from grpo_runs import grpo_run, make_task, name_of, steps, train_rank
from test_grpo_ranks import CUT, MODEL

from shardwise.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"alone": (dict(replicate=1), MODEL)} | CUT


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


def train_over_nccl(rank: int, run: Run, out: Path, store: str) -> None:
    """As a rank with a GPU of its own."""
    torch.cuda.set_device(rank)
    dist.destroy_process_group()
    world = run.layout.world
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    train_rank(rank, run, out)


def check(ranks: RankPool, task: Path, folder: Path, name: str, asynchronous: bool, over_nccl: bool = False) -> None:
    layout, model = LAYOUTS[name]
    objective = dict(asynchronous=asynchronous, variant="dapo", filter_rounds=2)

    def run(device: str, layout: dict[str, Any]) -> Run:
        train = dict(steps=3, microbatch=1, device=device)
        return grpo_run(task, layout=layout, model=model, train=train, objective=objective)

    train_rank(0, run("cpu", {}), folder / "cpu")
    spread, out = run("cuda", layout), folder / name_of(layout)
    if over_nccl:
        with tempfile.TemporaryDirectory() as store:
            ranks.run(spread.layout.world, train_over_nccl, spread, out, f"{store}/store")
    else:
        ranks.run(spread.layout.world, train_rank, spread, out)
    expected, found = steps(folder / "cpu"), steps(out)
    assert len(expected) == len(found) == 3
    assert all(step["grad_norm"] > 1e-6 and step["reward"] > 0 for step in expected)
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["alone", "tensor", "pipeline", "expert"])
def test_ranks_that_share_a_gpu_learn_as_the_cpu(
    ranks: RankPool, task: Path, tmp_path: Path, name: str, asynchronous: bool
) -> None:
    check(ranks, task, tmp_path, name, asynchronous)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["tensor", "pipeline", "expert"])
def test_ranks_over_nccl_learn_as_the_cpu(
    ranks: RankPool, task: Path, tmp_path: Path, name: str, asynchronous: bool
) -> None:
    check(ranks, task, tmp_path, name, asynchronous, over_nccl=True)
