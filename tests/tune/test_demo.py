"""`make demo-tune`: a tiny model learns to reverse words, from few right answers among many wrong ones and then by rewards. What it
shows is the commands' own; the fast tests hold what it needs to learn at all."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from math import comb
from pathlib import Path
from typing import Any

import pytest

from shardwise.run import read_run

ROOT = Path(__file__).parents[2]
REVERSE = ROOT / "examples" / "reverse"
STAGES = ("pretrain", "sft", "grpo")


def make_words(folder: Path) -> None:
    subprocess.run([sys.executable, str(REVERSE / "words.py"), str(folder)], check=True)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recipe() -> str:
    """The commands of `make demo-tune`, with this Python."""
    lines = re.search(r"^demo-tune:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lines is not None
    own = {"$(BIN)/python": sys.executable, "$(BIN)/shardwise": f"{sys.executable} -m shardwise", "$$": "$"}
    text = lines[1]
    for name, value in own.items():
        text = text.replace(name, value)
    return "set -e\n" + text


def test_most_groups_of_answers_tell_right_from_wrong(tmp_path: Path) -> None:
    """GRPO learns from groups whose answers differ. A model that has learned its examples answers right as often as they do: with
    one right answer in ten, four of ten groups had none, and whether it learned depended on the rounding of the machine."""
    make_words(tmp_path)
    examples = rows(tmp_path / "examples.jsonl")
    right = Counter(row["prompt"] for row in examples if row["completion"] == row["prompt"][-2::-1])
    shown = Counter(row["prompt"] for row in examples)
    shares = {right[word] / shown[word] for word in shown if word[:-1] != word[-2::-1]}
    assert len(shares) == 1, "some words are reversed more often than others"
    share, group = shares.pop(), read_run(REVERSE / "grpo.toml").objective.group
    assert share < 0.5, "greedy answers would be right before there is any reward"
    mixed = sum(comb(group, n) * share**n * (1 - share) ** (group - n) for n in range(1, group))
    assert mixed > 0.85


def test_no_word_of_the_test_is_learned_from(tmp_path: Path) -> None:
    make_words(tmp_path)
    sets = [{row["prompt"] for row in rows(tmp_path / f"{name}.jsonl")} for name in ("examples", "words", "test")]
    text = {line.partition("=")[0] + ">" for line in (tmp_path / "text.txt").read_text().splitlines()}
    assert len(set().union(*sets, text)) == sum(map(len, (*sets, text)))


def test_data_that_is_there_keeps_its_date(tmp_path: Path) -> None:
    """Otherwise the demo could be run once only: sets of files that have changed are refused."""
    make_words(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    make_words(tmp_path)
    assert {path.stat().st_mtime for path in tmp_path.iterdir()} == {1}


def test_all_stages_are_of_one_network() -> None:
    first, *others = [read_run(REVERSE / f"{stage}.toml") for stage in STAGES]
    assert all(run.model == first.model for run in others)
    assert [run.train.weights for run in others] == ["runs/reverse/pretrain", "runs/reverse/sft"]


@pytest.mark.large("that the demo learns: it has once stopped to, unnoticed", campaign=True)
def test_it_learns_to_reverse_words(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}

    def run(text: str) -> str:
        command = ["bash", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def cpu_seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began = cpu_seconds()
    printed = r"^  exact_match +([0-9.]+)"  # by `eval`; training has a reward of that name
    found = [float(value) for value in re.findall(printed, run(recipe()), re.MULTILINE)]
    assert len(found) == 3, found
    before, shown, practised = found
    assert before < 0.1
    assert shown < 0.1
    assert practised > 0.7
    assert cpu_seconds() - began < 600
    assert len(re.findall(printed, run(recipe()), re.MULTILINE)) == 3, "all of it is there already"
    again = "--out again --train.steps=5 --train.eval_every=0"
    run(f"{sys.executable} -m shardwise train examples/reverse/grpo.toml {again}")
    one, other = (
        [(row["step"], row["loss"], row["grad_norm"], row["reward"]) for row in rows(folder / "metrics.jsonl") if "loss" in row]
        for folder in (tmp_path / "runs" / "reverse" / "grpo", tmp_path / "again")
    )  # fmt: skip
    assert one[:5] == other[:5]
