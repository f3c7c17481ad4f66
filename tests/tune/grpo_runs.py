"""Runs that are small in every way, in float64."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from parallel_pool import RankPool

from shardwise.cli.main import main
from shardwise.run import Run, run_from_dict
from shardwise.train.loop import train
from shardwise.tune.source import source_of

SAME = (
    "loss",
    "grad_norm",
    "reward",
    "reward_std",
    "completion_tokens",
    "step_tokens",
    "tokens",
    "kl",
    "mismatch",
    "clip_fraction",
    "filtered_groups",
)
REWARDS = '''
def letters(prompt, completion, row):
    """How much of an answer are letters that are wanted: some third of all."""
    return sum(ord(letter) % 3 == row["id"] % 3 for letter in completion) / max(len(completion), 1)


def short(prompt, completion, row):
    return -len(completion) / 10
'''


def make_task(folder: Path) -> Path:
    """Write a set of prompts and a file of rewards into a folder."""
    draw = random.Random(0)
    rows = [dict(prompt=draw.choice("abc") * draw.randint(1, 3), id=n) for n in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    assert main(["data", "build", "--chat", str(folder / "prompts.jsonl"), "--out", str(folder / "set"), "--json"]) == 0
    return folder


def grpo_run(folder: Path, **more: dict[str, Any]) -> Run:
    """A run on the task of a folder; further keys by section."""
    train = dict(
        steps=4, global_batch=8, seq_len=16, dtype="float64", device="cpu", eval_every=0, lr=1e-2, schedule="constant"
    )
    sections: dict[str, dict[str, Any]] = dict(
        model=dict(layers=2, hidden=32, heads=4, kv_heads=2, vocab=260),
        train=train,
        objective=dict(kind="grpo", rewards=[f"{folder / 'rewards.py'}:letters"], group=4, completion_tokens=6),
        data=dict(sets=[str(folder / "set")]),
        serve=dict(page_tokens=4, max_sequences=8),
    )
    for section, values in more.items():
        sections[section] = sections.get(section, {}) | values
    return run_from_dict(sections)


def train_rank(rank: int, run: Run, out: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train(run, out, open_source=source_of)


def steps(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: line[k] for k in SAME if k in line} for line in lines if "loss" in line]


def name_of(layout: dict[str, Any]) -> str:
    """The folder of a run on a layout."""
    return "-".join(f"{k}{v}" for k, v in layout.items())


def assert_learns_as_one_process(ranks: RankPool, run: Any, layout: dict[str, Any], folder: Path) -> None:
    """A run on a layout is that of one process."""
    alone, spread = run({}), run(layout)
    if not (folder / "alone").exists():
        train_rank(0, alone, folder / "alone")
    out = folder / name_of(layout)
    ranks.run(spread.layout.world, train_rank, spread, out)
    expected, found = steps(folder / "alone"), steps(out)
    assert len(expected) == len(found) > 1
    assert all(step["grad_norm"] > 1e-6 and step["reward"] > 0 for step in expected)
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-9)
