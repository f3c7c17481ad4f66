"""A recipe done whole: the same bytes with any number of workers and after any kill; every document has a fate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from flushed import flushes_watched

from shardwise.cli.main import main
from shardwise.data import TokenSet
from shardwise.data.prepare import stages
from shardwise.data.prepare.fates import Fates
from shardwise.data.prepare.prepare import prepare
from shardwise.data.prepare.recipe import read_recipe
from shardwise.run.problems import UserError

Read = Callable[[Path], dict[str, bytes]]


def do(corpus: Path, out: str, workers: int = 1) -> dict:
    return prepare(read_recipe(corpus / "recipe.toml"), corpus, corpus / out, workers=workers)


def test_fates_statistics_documents_and_tokens_agree(corpus: Path) -> None:
    found = do(corpus, "out")
    fates = Fates(corpus / "out")
    assert len(fates) == found["documents"] == 300
    ended = Counter(fates[row].step for row in range(300))
    assert {step["kind"]: step["removed"] for step in found["steps"] if step["removed"]} == {
        step: count for step, count in ended.items() if step
    }
    assert (
        min(ended[step] for step in ("", "gopher_repetition", "gopher_quality", "exact", "c4_quality", "minhash")) > 0
    )
    lines = [
        json.loads(line)
        for path in sorted((corpus / "out/documents").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    kept = {fates[row].id: fates[row] for row in range(300) if fates[row].kept}
    assert {line["id"]: len(line["text"]) for line in lines} == {name: fate.characters for name, fate in kept.items()}
    sets = {name: TokenSet.open(corpus / "out/tokens" / name) for name in ("web", "more")}
    assert sum(each.index.documents for each in sets.values()) == len(lines) == found["kept"]
    assert b"@mail.example.net" not in b"".join(path.read_bytes() for path in (corpus / "out/documents").iterdir())
    assert any("privacy" in fate.changed for fate in kept.values())
    for row in fates.where("exact"):
        fate = fates[row]
        first = text_at(corpus, fate.other)
        assert " ".join(text_at(corpus, fate.id).split()) == " ".join(first.split())
    # What each document came to a step with adds up: nothing is lost between steps.
    steps = found["steps"]
    for before, after in pairwise(steps):
        assert after["documents"] == before["documents"] - before["removed"]
    assert steps[-1]["documents"] - steps[-1]["removed"] == found["kept"]


def text_at(corpus: Path, name: str) -> str:
    file, _, place = name.rpartition(":")
    with open(corpus / file, "rb") as source:
        source.seek(int(place))
        return json.loads(source.readline())["text"]


@pytest.mark.drawn(group="preparation")
def test_a_kill_at_any_task_loses_nothing(corpus: Path, written: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    do(corpus, "whole")
    real = stages.perform
    tasks = 0

    def dying(*args: object) -> None:
        nonlocal tasks
        tasks += 1
        if tasks % 5 == 0:
            raise KeyboardInterrupt
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("shardwise.data.prepare.executors.perform", dying)
    starts = 0
    while True:
        starts += 1
        try:
            do(corpus, "killed")
            break
        except KeyboardInterrupt:
            continue
    assert starts > 4
    assert written(corpus / "killed") == written(corpus / "whole")
    assert do(corpus, "killed")["already"]


@pytest.mark.drawn(group="preparation")
def test_a_power_failure_leaves_no_empty_file(corpus: Path) -> None:
    with flushes_watched() as unflushed:
        prepare(read_recipe(corpus / "recipe.toml"), corpus, corpus / "out", workers=1)
        assert unflushed(corpus / "out") == []


def test_a_kill_in_the_middle_of_a_task(corpus: Path, written: Read) -> None:
    """A process that dies without any cleaning up, in the middle of writing."""
    do(corpus, "whole")
    code = """
import os, signal, sys
from pathlib import Path
from shardwise.data.prepare import spill
from shardwise.data.prepare.prepare import prepare
from shardwise.data.prepare.recipe import read_recipe
write, left = spill.DocumentFile.write, [int(sys.argv[2])]
def dying(*args):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
spill.DocumentFile.write = dying
corpus = Path(sys.argv[1])
prepare(read_recipe(corpus / "recipe.toml"), corpus, corpus / "killed", workers=1)
"""
    done = subprocess.run([sys.executable, "-c", code, str(corpus), "100"], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list((corpus / "killed/work").rglob("*.tmp"))
    do(corpus, "killed")
    assert written(corpus / "killed") == written(corpus / "whole")


def test_another_recipe_or_another_file_is_refused(corpus: Path) -> None:
    do(corpus, "out")
    (corpus / "recipe.toml").write_text((corpus / "recipe.toml").read_text().replace("0.5", "0.6"))
    with pytest.raises(UserError, match=r"another recipe \(sources differ\); use --restart"):
        do(corpus, "out")
    (corpus / "recipe.toml").write_text((corpus / "recipe.toml").read_text().replace("0.6", "0.5"))
    with open(corpus / "b.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UserError, match=r"other files \(.*b\.jsonl\)"):
        do(corpus, "out")


@pytest.mark.drawn(group="preparation")
def test_the_commands(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "prepare", str(corpus / "recipe.toml"), "--out", str(corpus / "out"), "--workers", "1"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    assert "is already prepared" in capsys.readouterr().out
    assert main(["data", "fate", str(corpus / "out"), "a.jsonl:0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a.jsonl:0: ")
    assert len(said.splitlines()) == 1
    assert main(["data", "fate", str(corpus / "out"), "--step", "kept", "--limit", "0", "--json"]) == 0
    kept = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(kept) == found["kept"]
    assert main(["data", "fate", str(corpus / "out"), "a.jsonl:1"]) == 2
    assert "no document at this place" in capsys.readouterr().err
    assert main(["data", "fate", str(corpus / "out"), "--step", "golpher"]) == 2
    assert main(["data", "fate", str(corpus)]) == 2
    run = (corpus / "out/data.toml").read_text()
    assert "weights = [1.0, 0.5]" in run


def test_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No [data] is written then: one without sets would train on the built-in corpus."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    recipe = '[[sources]]\nname = "a"\npaths = ["a.jsonl"]\n[[steps]]\nkind = "gopher_quality"\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    arguments = ["data", "prepare", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "no document is left to train on" in said
    assert "data.toml" not in said
    assert not (tmp_path / "out/data.toml").exists()


def test_a_test_set_that_changes_is_another_plan(tmp_path: Path) -> None:
    """In one process too, where rules and lists of files are kept between tasks."""
    text = " ".join(f"word{letter}" for letter in "abcdefghijklmnop")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + '\n{"text": "something else"}\n')
    (tmp_path / "test.txt").write_text(text.replace("word", "other"))
    steps = '[[steps]]\nkind = "decontaminate"\npaths = ["test.txt"]\n'
    (tmp_path / "recipe.toml").write_text('[[sources]]\nname = "a"\npaths = ["a.jsonl"]\n' + steps)
    recipe = read_recipe(tmp_path / "recipe.toml")
    assert prepare(recipe, tmp_path, tmp_path / "out", workers=1)["kept"] == 2
    assert do(tmp_path, "out")["already"]
    (tmp_path / "test.txt").write_text(text + " and more")
    with pytest.raises(UserError, match=r"other files \(.*test\.txt\)"):
        prepare(recipe, tmp_path, tmp_path / "out", workers=1)
    assert prepare(recipe, tmp_path, tmp_path / "out", workers=1, restart=True)["kept"] == 1
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    assert prepare(recipe, tmp_path, tmp_path / "out", workers=1, restart=True)["kept"] == 2
