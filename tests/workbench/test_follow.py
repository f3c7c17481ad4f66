"""Files followed as they grow, and pictures of long series that lose nothing that can be seen."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message

from shardwise.cli.main import main
from shardwise.train.faults.goodput import goodput, read_events
from shardwise.train.progress.metrics import read_metrics
from shardwise.workbench.admission import encoded
from shardwise.workbench.app import make_app
from shardwise.workbench.columns import BLOCK, Series
from shardwise.workbench.follow import FollowedRun, run_folders
from shardwise.workbench.watch import Asked, Watch


def line(**values: Any) -> str:
    return json.dumps(values) + "\n"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40_000), st.integers(16, 300), st.integers(0, 2**32 - 1), st.data())
def test_a_picture_has_every_peak(count: int, columns: int, seed: int, data: st.DataObject) -> None:
    values = np.random.default_rng(seed).standard_normal(count)
    series = Series()
    for part in np.array_split(np.arange(count), 3):
        series.extend((part + 1).tolist(), values[part].tolist())
    low = data.draw(st.integers(-5, count))
    high = data.draw(st.integers(low, count + 5))
    x, y = series.picture(low, high, columns)
    assert x == sorted(set(x))
    assert all(values[int(step) - 1] == value for step, value in zip(x, y, strict=True))
    # Nothing of the range is lost: neither its lowest nor its highest point, nor its ends.
    inside = values[max(0, low - 1) : max(0, min(count, high))]
    if len(inside):
        assert min(y) <= inside.min()
        assert max(y) >= inside.max()
        assert x[0] <= max(1, low)
        assert x[-1] >= min(count, high)
    assert len(x) <= 2 * columns + 2 * columns + 2 * BLOCK + 4


@pytest.mark.parametrize("count", [8_190, 8_200, 20_000, 102_400, 102_500, 1_000_000])
def test_a_long_run_fills_every_column(count: int) -> None:
    series = Series()
    series.extend(list(range(count)), np.random.default_rng(0).standard_normal(count).tolist())
    x, _ = series.picture(-np.inf, np.inf, 800)
    assert 1000 < len(x) <= 1700
    assert max(np.diff(x)) <= 4 * count / 800


def test_what_is_not_finite_is_a_gap() -> None:
    series = Series()
    series.extend([1, 2, 3], [1.0, float("nan"), float("inf")])
    assert series.picture(0, 9, 100) == ([1, 2, 3], [1.0, None, None])
    series.extend(list(range(4, 9000)), [float("nan")] * 8996)
    assert series.picture(0, 1e9, 16)[1][0] == 1.0


def values_of(run: FollowedRun, key: str) -> list[Any]:
    return run.series[key].picture(-np.inf, np.inf, 4000)[1]


def test_a_file_is_read_on_from_where_it_was_read_to(tmp_path: Path) -> None:
    run, file = FollowedRun(tmp_path, "run"), tmp_path / "metrics.jsonl"
    assert not run.look()
    file.write_text(line(step=1, loss=5.0, seconds=1.0) + '{"step": 2, "lo')
    assert run.look()
    assert values_of(run, "loss") == [5.0]
    assert not run.look()
    with open(file, "a") as more:
        more.write('ss": 4.0, "seconds": 2.0}\n' + "not json\n" + line(step=3, loss="nan", seconds=1.0, skipped=True))
        more.write(line(step=3, compute_seconds=[1.0, 2.0], slowest=1, slowest_ratio=1.3) + line(step=3, eval_loss=3.5))
    assert run.look()
    assert values_of(run, "loss") == [5.0, 4.0, None]
    assert values_of(run, "eval_loss") == [3.5]
    assert (run.useful, run.skipped) == (3.0, 1.0)
    assert list(run.ranks) == [(3, [1.0, 2.0])]


def test_a_line_longer_than_what_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.workbench.follow.CHUNK", 64)
    run, file = FollowedRun(tmp_path, "run"), tmp_path / "metrics.jsonl"
    samples = [{"prompt": "p" * 100, "text": "t"}]
    file.write_text(line(step=1, loss=1.0) + line(step=1, samples=samples) + line(step=2, loss=2.0) + "{" + "x" * 100)
    while run.look() and run.more:
        pass
    assert values_of(run, "loss") == [1.0, 2.0]
    assert [each["texts"] for each in run.samples] == [samples]
    assert not run.more


@pytest.mark.parametrize(
    "damaged",
    [
        '{"step": 1%s, "loss": 1}' % ("0" * 400),
        '{"step": 1, "loss": 1%s}' % ("0" * 400),
        '{"step": 1, "compute_seconds": [NaN, 1]}',
        '{"what": [], "time": 1}',
        '{"what": "begin", "time": NaN}',
        '{"what": "bad", "time": 1, "loss": Infinity}',
        '{"what": "begin", "time": 1%s}\n{"what": "end", "time": 2}' % ("0" * 400),
    ],
    ids=lambda text: text.replace("0" * 400, "0…"),
)
def test_a_damaged_record_ends_no_page(damaged: str, tmp_path: Path) -> None:
    for name, file in (("sound", "metrics.jsonl"), ("damaged", "metrics.jsonl"), ("damaged", "events.jsonl")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(line(step=1, loss=5.0) + (damaged + "\n") * (name == "damaged"))
    told = json.loads(encoded(Watch(tmp_path).answer({})))
    assert [told["series"][name]["loss"][1][0] for name in ("sound", "damaged")] == [5.0, 5.0]


def test_a_run_that_resumed_is_read_anew(tmp_path: Path) -> None:
    run, file = FollowedRun(tmp_path, "run"), tmp_path / "metrics.jsonl"
    lines = [line(step=n, loss=float(n), seconds=1.0) for n in range(1, 50)]
    file.write_text("".join(lines))
    run.look()
    # Truncated to step 20, and as many other steps written as were lost: the file is as long as before.
    os.truncate(file, len("".join(lines[:20])))
    with open(file, "a") as more:
        more.write("".join(line(step=n, loss=float(-n), seconds=2.0) for n in range(21, 60)))
    assert run.look()
    assert values_of(run, "loss") == [*map(float, range(1, 21)), *(-float(n) for n in range(21, 60))]
    assert run.useful == 20 + 39 * 2


def test_goodput_is_what_the_trainer_says(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(line(step=n, loss=1.0, seconds=3.0) for n in range(1, 20)))
    events = [
        ("begin", 0, {}),
        ("training", 10, {"step": 0}),
        ("saved", 50, {"step": 9, "seconds": 4.0}),
        ("end", 80, {}),
    ]
    (tmp_path / "events.jsonl").write_text(
        "".join(line(time=1e9 + at, what=what, command="a", **rest) for what, at, rest in events)
    )
    run = FollowedRun(tmp_path, "run")
    run.look()
    expected = goodput(read_events(tmp_path), read_metrics(tmp_path), 1e9 + 80)
    summary = run.summary(now=5e9)
    assert summary["state"] == "ended"
    assert summary["goodput"]["share"] == pytest.approx(expected.share)
    assert summary["goodput"]["lost"] == pytest.approx(expected.lost)


def test_runs_are_found_and_their_checkpoints_are_not(tmp_path: Path) -> None:
    for name in ("a", "b", "more/c"):
        (tmp_path / name / "checkpoints" / "step-5").mkdir(parents=True)
        (tmp_path / name / "run.toml").touch()
        (tmp_path / name / "checkpoints" / "run.toml").touch()
    names = [each.relative_to(tmp_path).as_posix() for each in run_folders(tmp_path)]
    assert names == ["a", "b", "more/c"]
    assert run_folders(tmp_path / "a") == [tmp_path / "a"]


def test_a_folder_of_another_user_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").touch()
    is_file = Path.is_file

    def guarded(path: Path) -> bool:
        if path.parent.name == "theirs":  # as for any user but root, for whom tests may run
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", guarded)
    assert run_folders(tmp_path) == [tmp_path / "mine"]
    assert [run["name"] for run in Watch(tmp_path).answer({})["runs"]] == ["mine"]


def test_a_watch_answers_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "run.toml").write_text(
        '[model]\npreset = "llama3-8b"\n[layout]\nshard = 8\n[cluster]\nchip = "h100"\n[train]\nglobal_batch = 8\n'
    )
    (folder / "metrics.jsonl").write_text(line(step=1, loss=5.0, tokens_per_s=100.0))
    watch = Watch(tmp_path)
    first = watch.answer({})
    assert first["series"]["one"]["loss"] == ([1.0], [5.0])
    low, high = first["planned"]["one"]["tokens_per_s"][1:]
    assert low < first["planned"]["one"]["tokens_per_s"][0] < high
    assert watch.answer({"seen": first["versions"]}) == {"unchanged": True}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line(step=2, loss=4.0))
    assert watch.answer({"seen": first["versions"]})["series"]["one"]["loss"] == ([1.0, 2.0], [5.0, 4.0])
    assert watch.answer({"metrics": ["tokens_per_s"]})["series"]["one"].keys() == {"tokens_per_s"}


def test_runs_that_are_not_shown_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.workbench.watch.MOST_RUNS", 2)
    monkeypatch.setattr("shardwise.workbench.watch.RESCAN", -1.0)
    for name in "bac":
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").touch()
    watch = Watch(tmp_path)
    first = watch.answer({})
    assert ([run["name"] for run in first["runs"]], first["left_out"]) == (["a", "b"], 1)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "run.toml").touch()
    assert watch.answer({"seen": first["versions"]})["left_out"] == 2


def posted(app: ASGIApp, path: str, content: Any) -> Any:
    """The JSON that a page's question is answered with, without a server."""
    sent: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(content).encode()}

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    return json.loads(b"".join(sent))


def test_a_run_file_is_planned_as_it_is_now(tmp_path: Path) -> None:
    """A run's first event comes before its run file, which is written anew when it resumes with other keys."""
    folder, text = tmp_path / "one", '[cluster]\nchip = "h100"\n[train]\nsteps = {}\n'
    folder.mkdir()
    (folder / "events.jsonl").write_text(line(time=1e9, what="begin"))
    watch = Watch(tmp_path)
    app = make_app(None, watch)
    assert watch.answer({})["planned"] == {"one": None}
    for steps in (100, 2000):
        (folder / "run.toml").write_text(text.format(steps))
        assert watch.answer({})["planned"]["one"]["steps"] == steps
        assert posted(app, "/api/plan", {"run": "one"})["plan"]["run"]["train"]["steps"] == steps


def test_a_folder_of_runs_takes_no_keys_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").touch()
    assert main(["workbench", str(tmp_path), "--layout.tensor=2", "--no-open"]) == 2
    assert capsys.readouterr().err.startswith("error: --layout.tensor changes one run")


@pytest.mark.parametrize(
    "question", [{"low": "x", "high": 10**400, "columns": -5}, {"runs": 5, "metrics": {}, "seen": []}]
)
def test_an_odd_question_is_answered(question: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    Watch(tmp_path).answer(question)
    assert 16 <= Asked.of(question).columns <= 4000
