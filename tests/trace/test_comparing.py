"""One run against another and against a plan, on the command line too: numbers, exit codes, and a user's mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_jobs import Host, job_member, message
from profile_files import text_of, write

from shardwise.cli.main import main
from shardwise.trace.export import bare


def profile(folder: Path, gemm: str, work: int) -> Path:
    """One rank, two steps of a microsecond (and more work a little longer)."""
    host = Host()
    for number in range(2):
        begin = number * (600 + work)
        host.step(number, begin, 600 + work)
        host.launch(gemm, begin + 5, begin + 100, work)
        host.launch("add", begin + 6, begin + 100 + work, 100)
        host.launch("nccl", begin + 7, begin + 200 + work, 100, 9, **message("allreduce", 100, "5", 2))
    return write(folder / "rank-0.json", text_of(host.events, job_member(0, 2, {"5": ("replicate", (0, 1))})))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("void gemm<128, 64, Foo<int> >(int, float*)", "void gemm<256, 64, Foo<long> >(int, double*)"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_32x32_nn"),
    ],
)
def test_names_without_their_parameters(one: str, other: str) -> None:
    assert bare(one) == bare(other) != ""


def test_names_of_different_kernels_stay_apart() -> None:
    assert bare("volta_sgemm_128x64_nn") != bare("volta_sgemm_128x64_tn")


def test_a_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = profile(tmp_path / "before", "gemm_128x64_nn", 400)
    after = profile(tmp_path / "after", "gemm_256x64_nn", 500)
    words = ["trace", str(after), "--no-cache", "--json", "--against", str(before), "--fail-above"]
    assert main([*words, "9"]) == 1
    found = json.loads(capsys.readouterr().out)["against"]
    assert found["slower_percent"] == pytest.approx(10)
    assert not found["passed"]
    kernels = {tuple(row["before"]): row for row in found["kernels"]}
    changed = kernels["gemm_128x64_nn",]
    assert changed["after"] == ["gemm_256x64_nn"]
    assert (changed["time_before"], changed["time_after"], changed["calls_after"]) == (400, 500, 1)
    assert kernels["add",]["change"] == 0
    assert main([*words, "11"]) == 0
    assert json.loads(capsys.readouterr().out)["against"]["passed"]


def test_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = profile(tmp_path / "before", "gemm", 400), profile(tmp_path / "after", "gemm", 500)
    assert main(["trace", str(after), "--no-cache", "--against", str(before), "--fail-above", "5"]) == 1
    said = capsys.readouterr().out
    assert "10.0% slower than before" in said
    assert "more than the 5% allowed" in said


def test_against_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = profile(tmp_path / "run", "gemm", 400)
    planned = dict(
        step_seconds=1e-6,
        tokens_per_s=1e9,
        breakdown={"matmul": 5e-7, "replicate": 5e-7},
        traffic={"replicate": {"all_reduce": 400.0}},
    )
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(planned))
    assert main(["trace", str(path), "--no-cache", "--json", "--against", str(plan), "--fail-above", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["against"]
    rows = {row["name"]: (row["first"], row["second"]) for row in found["differences"]}
    assert rows["bytes replicate all_reduce"] == (400, 400)
    assert rows["matmul"] == (5e-7, pytest.approx(4e-7))
    assert rows["step"] == (1e-6, pytest.approx(1e-6))


def test_export(tmp_path: Path) -> None:
    path = profile(tmp_path / "run", "gemm", 400)
    assert main(["trace", str(path), "--no-cache", "--json", "--export", str(tmp_path / "out.json")]) == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    drawn = [(e["name"], e["cat"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn.count(("nccl", "replicate", 0.1)) == 2
    assert drawn.count(("gemm", "matmul", 0.4)) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fail-above", "5"], "--fail-above needs --against"),
        (["--against", "nowhere"], "nowhere does not exist"),
        (["--against", "plan"], "no run.toml"),
        (["--chip", "h10"], "no chip"),
    ],
)
def test_a_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    path = profile(tmp_path, "gemm", 400)
    assert main(["trace", str(path), "--no-cache", *words]) == 2
    assert said in capsys.readouterr().err
