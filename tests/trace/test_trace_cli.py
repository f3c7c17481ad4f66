"""`shardwise trace`: what scripts rely on, and what people read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from profile_files import distributed, kernel, span, step, text_of, write

from shardwise.cli.main import main

NAMES = {"span", "compute", "communication", "copy", "idle", "exposed_communication"}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks 2 and 3 of 8, with steps 5 and 6."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for rank in (2, 3):
        events = [
            step(5, 0, 1000),
            step(6, 1000, 1000),
            span("cpu_op", "aten::mm", 10, 20),
            span("cpu_op", "aten::mm", 1010, 20),
        ]
        for at in (0, 1000):
            events += [
                kernel("gemm", at + 100, 300 + rank),
                kernel("ncclDevKernel", at + 350, 200, 20),
                kernel("m", at + 700, 100, 9, "gpu_memset"),
            ]
        write(tmp_path / f"job/{rank}.json", text_of(events, before=distributed(rank)))
    return tmp_path / "job"


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["trace", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, job)
    assert {"ranks", "steps", "axes", "stragglers", "findings", "problems"} <= set(said)
    assert set(said["ranks"]) == {"2", "3"}
    for rank, row in said["ranks"].items():
        assert set(row) == NAMES
        assert all(type(value) is int for value in row.values())
        compute = 2 * (300 + int(rank))
        hidden = 2 * (50 + int(rank))
        assert row == {"span": 2000, "compute": compute, "communication": 400, "copy": 200, "exposed_communication": 400 - hidden,
                       "idle": 2000 - compute - 400 - 200 + hidden}  # fmt: skip
    assert said["steps"] == [5, 6]
    assert said["windows"]["2"] == [[5, 0, 1000], [6, 1000, 2000]]
    assert said["problems"] == []


def test_steps_and_events(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = answer(capsys, job, "--from-step", 6)
    assert second["steps"] == [6]
    assert second["ranks"]["2"]["span"] == 1000
    assert answer(capsys, job, "--to-step=5")["steps"] == [5]
    everything = answer(capsys, job, "--all-events")
    assert everything["steps"] == []
    assert everything["ranks"]["2"]["span"] == 1800 - 100
    assert everything["windows"]["2"] == [[None, 100, 1800]]


def test_one_bad_file_among_good_ones(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(job / "4.json", b'{"traceEvents": [{"ph')
    said = answer(capsys, job)
    assert set(said["ranks"]) == {"2", "3"}
    assert len(said["problems"]) == 1
    assert "4.json" in said["problems"][0]
    assert "byte 21" in said["problems"][0]


def test_no_steps(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(job.parent / "plain.json", text_of([kernel("gemm", 5, 10)]))
    said = answer(capsys, path)
    assert said["ranks"]["0"]["compute"] == said["ranks"]["0"]["span"] == 10
    assert said["steps"] == []
    assert "no complete profiler step" in said["problems"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no such file"),
        (["{job}", "--from-step", "99"], "the profiles have 5 to 6"),
        (["{job}", "--from-step", "6", "--to-step", "5"], "comes before"),
        (["{job}", "--all-events", "--from-step", "5"], "whole file"),
        (["{job}", "--from-step", "x"], "--from-step"),
        (["{job}/..", "--wrong"], "--wrong"),
        ([], "PATH"),
    ],
)
def test_mistakes(job: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *(argument.format(job=job) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_the_cache_is_used_and_can_be_left_out(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, job, "--no-cache")
    assert not (tmp_path / "cache").exists()
    first = answer(capsys, job, "--cache", tmp_path / "here")
    assert len(list((tmp_path / "here").iterdir())) == 2
    assert answer(capsys, job, "--cache", tmp_path / "here") == first
    answer(capsys, job)
    assert (tmp_path / "cache/shardwise/traces").is_dir()


def test_for_people(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(job)]) == 0
    said = capsys.readouterr().out
    assert "1.00 µs" in said  # a step, of two
    assert "5, 6" in said
