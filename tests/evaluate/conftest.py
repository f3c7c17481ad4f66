"""A small model trained on conversations for a moment, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.data.build import build
from shardwise.data.chat.job import ChatOptions
from shardwise.run import run_from_dict
from shardwise.train.loop import train

LENGTH = 48


@pytest.fixture(scope="session")
def chat_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(60)]
    rows += [{"prompt": "p" * 90, "completion": "q"}, {"prompt": "p", "completion": "q" * 90}]  # too long for a row
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build([folder / "rows.jsonl"], folder / "set", workers=1, chat=ChatOptions()).folder


@pytest.fixture(scope="session")
def trained(chat_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder."""
    run = run_from_dict(
        dict(
            name="tuned",
            model=dict(layers=1, hidden=32, heads=2, vocab=257),
            data=dict(sets=[str(chat_set)]),
            train=dict(steps=30, seq_len=LENGTH, global_batch=8, eval_every=30, device="cpu", dtype="float64", lr=0.01),
        )
    )
    folder = tmp_path_factory.mktemp("run") / "run"
    train(run, folder)
    return folder
