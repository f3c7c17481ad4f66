"""A recorded run says what it did: every byte on its axis as planned, the actions of the schedule in their order, and labels that
leave nothing behind."""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from parallel_pool import RankPool

from shardwise.cli.main import main
from shardwise.cli.measuring.profile import chosen_ranks
from shardwise.data.open import open_data
from shardwise.labels import read_label
from shardwise.measure.profile import Recording, prepare_folder, rank_file, record
from shardwise.plan.cost.flops import parameters
from shardwise.plan.trainer.traffic import traffic
from shardwise.run import Run, UserError, read_run, run_from_dict
from shardwise.schedules import make_schedule

LAYOUT = dict(tensor=2, pipeline=2)
STEPS = 2


def make_run(layout: dict[str, Any], **train: Any) -> Run:
    """A small model that knows the bytes of the built-in corpus."""
    model = dict(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=257)
    return run_from_dict(dict(model=model, layout=layout, train=dict(seq_len=32, microbatch=1, device="cpu") | train))


def recorded(rank: int, run: Run, folder: Path, ranks: tuple[int, ...] | None = None, modules: bool = False) -> bool:
    """Record on a rank of the pool; whether the train state is left without labels."""
    train_state = record(run, folder, Recording(STEPS, 1, ranks, modules))
    hooks = sum(
        len(m._forward_pre_hooks) + len(m._forward_hooks)
        for model in train_state.parallel.models
        for m in model.modules()
    )
    again = type(train_state)(run, train_state.mesh)
    fresh = sum(
        len(m._forward_pre_hooks) + len(m._forward_hooks) for model in again.parallel.models for m in model.modules()
    )
    return hooks == fresh and "_execute" not in vars(train_state.parallel.pipeline)


@functools.cache
def spans(folder: Path, rank: int) -> list[dict[str, Any]]:
    with gzip.open(rank_file(folder, "ranks", rank)) as file:
        events = json.load(file)["traceEvents"]
    return sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])


SHARED = pytest.mark.drawn(group="profiles", unit="a profile of ranks")
"""Tests that read the same profile are drawn together."""


@pytest.fixture(scope="module")
def profile(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, two steps."""
    folder = tmp_path_factory.mktemp("profiles") / "profile"
    run = make_run(LAYOUT, global_batch=4)
    open_data(run)
    prepare_folder(folder)
    assert all(ranks.run(4, recorded, run, folder))
    return folder


def axes_as_planned(profile: Path, rank: int) -> set[str]:
    """The axes that a rank sent over, each byte as planned."""
    run = read_run(profile / "run.toml", [])
    manifest = json.loads((profile / "profile.json").read_text())
    sent: Counter[tuple[str, ...]] = Counter()
    for event in spans(profile, rank):
        label = read_label(event["name"])
        if label is not None and label.kind == "message":
            sent[label.words[:2]] += Fraction(label.words[2])  # type: ignore[assignment]
    planned = traffic(run, rank).bytes
    expected = {(axis, kind): STEPS * size for axis, kinds in planned.items() for kind, size in kinds.items() if size}
    assert sent == expected
    counted = {(each["axis"], each["collective"]): Fraction(each["bytes"]) for each in manifest["traffic"][rank]}
    assert counted == expected
    return {axis for axis, _ in sent}


@SHARED
def test_every_byte_is_on_its_axis_as_planned(profile: Path) -> None:
    for rank in range(4):
        assert axes_as_planned(profile, rank) == {"tensor", "pipeline", "world"}


@SHARED
def test_the_executed_actions_are_the_schedule(profile: Path) -> None:
    run = read_run(profile / "run.toml", [])
    manifest = json.loads((profile / "profile.json").read_text())
    listed = make_schedule("1f1b", 2, run.accumulation, 1).ranks
    assert manifest["schedule"]["actions"] == [[str(action) for action in actions] for actions in listed]
    for rank in range(4):
        labels = [read_label(event["name"]) for event in spans(profile, rank)]
        done = [label.words[0] for label in labels if label is not None and label.kind == "action"]
        assert done == [str(action) for action in listed[rank // 2]] * STEPS
        assert manifest["pipeline_ranks"][rank] == rank // 2


@SHARED
def test_the_trace_reader_reads_what_was_planned(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every byte on its axis, the executed schedule and its bubble, the time to the nanosecond: from the files alone."""
    assert main(["trace", str(profile), "--json", "--no-cache"]) == 0
    said = json.loads(capsys.readouterr().out)
    run = read_run(profile / "run.toml", [])
    for rank in range(4):
        read = {
            (axis, kind): row["ranks"][str(rank)]["bytes"]
            for axis, kinds in said["axes"].items()
            for kind, row in kinds.items()
            if str(rank) in row["ranks"] and kind != "recv"
        }
        planned = traffic(run, rank).bytes
        assert read == {
            (axis, kind): STEPS * size for axis, kinds in planned.items() for kind, size in kinds.items() if size
        }
        times = said["ranks"][str(rank)]
        assert sum(said["categories"]["ranks"][str(rank)].values()) == times["span"]
    assert len(said["pipelines"]) == 2 * STEPS
    listed = make_schedule("1f1b", 2, run.accumulation, 1).ranks
    for step in said["pipelines"]:
        assert (step["schedule"], step["microbatches"]) == ("1f1b", run.accumulation)
        for rank, row in step["ranks"].items():
            assert row["actions"] == [str(action) for action in listed[int(rank) // 2]]
            assert row["bubble"] == row["scheduled"]
            assert row["work"] + row["bubble"] == step["window"]
    assert min(said["modules"]["attributed"].values()) > 0.8


@SHARED
def test_steps_modules_and_phases_are_labelled(profile: Path) -> None:
    names = [event["name"] for event in spans(profile, 3)]
    assert sum(name.startswith("ProfilerStep#") for name in names) == STEPS
    labels = {label for label in map(read_label, names) if label is not None}
    modules = {label.words[0] for label in labels if label.kind == "module"}
    for module in ("layers.1", "layers.1.attention.q", "layers.1.attention.core", "layers.1.ffn.down", "norm", "head"):
        assert module in modules
    assert not any(module.startswith("layers.0") for module in modules)
    assert {label.words[0] for label in labels if label.kind == "phase"} == {"data", "gradients", "clip", "optimizer"}


@SHARED
def test_what_lies_beside_the_traces(profile: Path) -> None:
    manifest = json.loads((profile / "profile.json").read_text())
    assert manifest["complete"]
    assert manifest["groups"][3].keys()
    assert sorted(g["ranks"] for g in manifest["groups"][3].values() if g["axis"] == "tensor") == [[2, 3]]
    assert sorted({tuple(g["ranks"]) for g in manifest["groups"][3].values() if g["axis"] == "pipeline"}) == [(1, 3)]
    assert [len(times) for times in manifest["clocks"]] == [10] * 4
    assert [len(times) for times in manifest["step_nanoseconds"]] == [STEPS] * 4
    assert json.loads((profile / "plan.json").read_text())["traffic"]
    with gzip.open(rank_file(profile, "memory", 0)) as file:
        assert json.load(file)["owners"]["parameters"] > 0


@pytest.mark.drawn(group="profiles")
def test_only_some_ranks(ranks: RankPool, tmp_path: Path) -> None:
    run = make_run(dict(shard=2), global_batch=2)
    prepare_folder(tmp_path / "new")
    assert all(ranks.run(2, recorded, run, tmp_path / "new", (1,), True))
    assert [path.name for path in (tmp_path / "new" / "ranks").iterdir()] == ["rank-00001.json.gz"]
    assert json.loads((tmp_path / "new" / "profile.json").read_text())["ranks"] == [1]
    assert axes_as_planned(tmp_path / "new", 1) == {"shard", "world"}
    rows = {row["module"]: row for row in json.loads((tmp_path / "new" / "modules.json").read_text())["ranks"][1]}
    assert rows["model"]["parameters"] == parameters(run.model).total
    seconds = {name: sum(row["seconds"].values()) for name, row in rows.items()}
    assert seconds.get("(unlabelled)", 0.0) < 0.3 * (seconds["model"] + seconds["(optimizer)"] + seconds["(clip)"])


def test_a_name_of_any_letters_is_recorded_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def in_ascii(path: Path, text: str, encoding: str | None = None) -> int:
        return write_text(path, text, encoding or "ascii")

    monkeypatch.setattr(Path, "write_text", in_ascii)
    run = replace(make_run({}, global_batch=1), name="modèle")
    prepare_folder(tmp_path)
    record(run, tmp_path, Recording(1, 1))
    assert read_run(tmp_path / "run.toml").name == "modèle"


def test_ranks_by_name() -> None:
    assert chosen_ranks("0,3-5", 8) == (0, 3, 4, 5)
    assert chosen_ranks(None, 8) is None
    for wrong in ("8", "1-", "x", "", "5-3", "9" * 5000, f"0-{'9' * 18}"):
        with pytest.raises(UserError, match="--ranks"):
            chosen_ranks(wrong, 8)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not a profile"):
        prepare_folder(tmp_path)
    prepare_folder(tmp_path / "new")
    prepare_folder(tmp_path / "new")


def test_mistakes_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text("[model]\nlayers = 1\nhidden = 32\nheads = 4\n[train]\nseq_len = 32\nglobal_batch = 2\n")
    for words, said in (
        (["--steps", "0"], "--steps"),
        (["--warmup", "0"], "--warmup"),
        (["--ranks", "1"], "the run has ranks 0 to 0"),
        (["--out", str(run)], "a profile is a folder"),
    ):
        assert main(["profile", str(run), *words]) == 2
        assert said in capsys.readouterr().err
