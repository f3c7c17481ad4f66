"""`make demo-tune`: a tiny model learns to reverse words, from few right answers among many wrong ones and then by rewards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwise.run import read_run

ROOT = Path(__file__).parents[2]
REVERSE = ROOT / "examples" / "reverse"
STAGES = ("pretrain", "sft", "grpo")


def make_words(folder: Path) -> None:
    subprocess.run([sys.executable, str(REVERSE / "words.py"), str(folder)], check=True)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
