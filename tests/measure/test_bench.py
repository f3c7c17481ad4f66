"""This machine measured into a profile: read by the planner, which then predicts a step of this very machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import main
from shardwise.hardware import COLLECTIVES, gemm_seconds, load_profile
from shardwise.measure.bench.collectives import bus_factor
from shardwise.measure.bench.kernels import Stopwatch, TimeBudget, gemm_shapes
from shardwise.measure.bench.machine import empty_profile, measure_kernels, step_seconds
from shardwise.plan.plan import plan
from shardwise.run import Run, run_from_dict

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def own_time() -> Iterator[None]:
    """Seconds are those this process computes, so that what others take of a busy machine is in no measurement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", time.process_time)
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick profile of this machine."""
    path = tmp_path_factory.mktemp("bench") / "profile.json"
    assert main(["bench", "--quick", "--seconds", "5", "--device", "cpu", "--quiet", "--out", str(path)]) == 0
    return path


def small_run(profile: Path) -> Run:
    model = dict(layers=2, hidden=128, heads=4, ffn=384, vocab=512)
    train = dict(steps=20, seq_len=128, global_batch=4, microbatch=4, dtype="float32", device="cpu")
    return run_from_dict(dict(model=model, train=train, cluster=dict(chip="cpu", profile=str(profile))))


@pytest.mark.drawn(group="profiles")
def test_a_profile_says_what_was_measured(bench: Path) -> None:
    profile = load_profile(bench)
    assert profile.chip == "cpu"
    assert profile.torch == torch.__version__
    assert profile.machine
    assert profile.date
    assert profile.launch > 0
    assert {p["dtype"] for p in profile.gemm} >= {"float32"}
    assert {p["direction"] for p in profile.attention} == {"forward", "backward"}
    assert profile.grouped
    assert profile.memory
    assert {p["operation"] for p in profile.elementwise} == {"norm", "rotary", "activation", "loss"}
    every = (*profile.gemm, *profile.grouped, *profile.memory, *profile.attention)
    assert all(p["seconds"] > 0 for p in every)


def test_more_work_takes_longer(bench: Path) -> None:
    seconds = {(p["m"], p["n"], p["k"]): p["seconds"] for p in load_profile(bench).gemm if p["dtype"] == "float32"}
    assert seconds[512, 512, 512] > 10 * seconds[32, 32, 32]


def test_the_planner_has_the_measured_times(bench: Path) -> None:
    cluster = plan(small_run(bench)).job.cluster
    for point in load_profile(bench).gemm[:5]:
        got = gemm_seconds(cluster.chip, point["m"], point["n"], point["k"], point["dtype"])
        assert got == pytest.approx(point["seconds"], rel=0.01)


def test_a_step_is_predicted_on_this_very_machine(bench: Path, tmp_path: Path) -> None:
    """Caches and memory are shared: what another process took from one of the two measurements is excused by measuring both
    again."""
    ratios: list[float] = []
    path = bench
    for attempt in range(3):
        run = small_run(path)
        measured = step_seconds(run, 1.0)
        ratios.append(plan(run).account.step_seconds / measured)
        if 0.5 < ratios[-1] < 2.0:
            return
        path = tmp_path / f"{attempt}.json"
        assert main(["bench", "--quick", "--seconds", "3", "--device", "cpu", "--quiet", "--out", str(path)]) == 0
    pytest.fail(f"predicted over measured: {ratios}")


def test_the_seconds_are_kept() -> None:
    spent: list[float] = []
    cases = list(TimeBudget(0.0).each(range(100)))
    assert not cases
    for _, most in TimeBudget(1.0, spent.append).each(range(4)):
        assert most <= 1.0
    assert spent[-1] == 1.0


def test_a_stopwatch_sees_longer_work() -> None:
    watch = Stopwatch(CPU, samples=3)
    a, b = torch.randn(16, 16), torch.randn(512, 512)
    assert watch.seconds(lambda: b @ b, 0.1) > watch.seconds(lambda: a @ a, 0.1)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_shapes_hold_small_skinny_and_square_products(cuda: bool, quick: bool) -> None:
    shapes = gemm_shapes(cuda, quick)
    assert any(m == 1 for m, _, _ in shapes)
    assert any(m == n == k for m, n, k in shapes)
    assert any(max(shape) >= 16 * min(shape) for shape in shapes)
    assert len(set(shapes)) == len(shapes)


def test_bus_bandwidth_follows_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(name, 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("send", 4) == 1.0


@pytest.mark.drawn(group="commands")
def test_collectives_of_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    command = ["bench", "--only", "collectives", "--ranks", "2", "--quick", "--seconds", "2", "--device", "cpu"]
    assert main([*command, "--out", str(path)]) == 0
    points: list[dict[str, Any]] = json.loads(path.read_text())["collective"]
    assert {p["operation"] for p in points} == set(COLLECTIVES)
    for p in points:
        assert p["size"] == 2
        assert p["algbw"] == pytest.approx(p["bytes"] / p["seconds"] / 1e9)
        assert p["busbw"] == pytest.approx(p["algbw"] * bus_factor(p["operation"], 2))
        shared = p["operation"] in ("all_gather", "reduce_scatter", "all_to_all")
        assert p["count"] * 4 * (2 if shared else 1) == p["bytes"]
    assert "busbw(GB/s)" in capfd.readouterr().out
    load_profile(path)


def test_mistakes_are_sentences_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    missing = str(tmp_path / "no" / "p.json")
    assert main(["bench", "--ranks", "0", "--device", "cuda", "--seconds", "-1", "--out", missing]) == 2
    said = capsys.readouterr().err
    for part in ("--ranks: is 0", "PyTorch sees no GPU", "has to be above 0", "its folder does not exist"):
        assert part in said
    assert main(["bench", "--only", "collectives", "--out", str(tmp_path / "p.json")]) == 2
    assert "needs --ranks of 2 or more" in capsys.readouterr().err
    assert main(["bench", "--out", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("only", "measured"),
    [
        ([], ["kernels", "collectives"]),
        (["--only", "kernels"], ["kernels"]),
        (["--only", "collectives"], ["collectives"]),
    ],
)
def test_only_what_is_asked_for_is_measured(
    only: list[str], measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    profile = empty_profile(CPU)
    monkeypatch.setattr("shardwise.cli.measuring.bench._kernels", lambda args: done.append("kernels") or profile)
    monkeypatch.setattr("shardwise.cli.measuring.bench._collectives", lambda args: done.append("collectives") or ())
    words = ["bench", "--ranks", "2", "--device", "cpu", "--quiet", "--out", str(tmp_path / "p.json")]
    assert main([*words, *only]) == 0
    assert done == measured


def test_a_profile_from_code_and_from_the_command_are_the_same_kind() -> None:
    progress: list[str] = []
    profile = measure_kernels(CPU, 0.3, quick=True, progress=lambda what, share: progress.append(what))
    assert profile.memory
    assert set(progress) == {
        "GEMMs",
        "grouped GEMMs",
        "attention",
        "memory",
        "elementwise",
        "host overhead",
    }
