"""Prompts with a small task, rewards for it, and runs that learn it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from shardwise.cli.main import main

REWARDS = '''
def letters(prompt, completion, row):
    """How much of an answer are letters that are wanted: some third of all."""
    return sum(ord(letter) % 3 == row["id"] % 3 for letter in completion) / max(len(completion), 1)


def short(prompt, completion, row):
    return -len(completion) / 10
'''


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set of prompts and a file of rewards."""
    folder = tmp_path_factory.mktemp("task")
    draw = random.Random(0)
    rows = [dict(prompt=draw.choice("abc") * draw.randint(1, 3), id=n) for n in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    assert main(["data", "build", "--chat", str(folder / "prompts.jsonl"), "--out", str(folder / "set"), "--json"]) == 0
    return folder
