"""Scores beside a set are what several writers put there, in any order, and a full disk is a sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.scores import ScoreIndex, Scores, ScoreWriter
from shardwise.run import UserError

TOKENS, COUNT, VOCAB = 500, 3, 70_000
INDEX = ScoreIndex("teacher", "net", "print", TOKENS, COUNT, VOCAB, 1.0, 64, False, "float32")


def begun(folder: Path, writers: int) -> list[ScoreWriter]:
    found = [ScoreWriter(folder, INDEX) for _ in range(writers)]
    found[0].begin()
    for writer in found:
        writer.open()
    return found


def test_writers_side_by_side(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    logprobs = random.normal(size=(TOKENS, COUNT)).astype(np.float32)
    tokens = random.integers(0, VOCAB, (TOKENS, COUNT))
    writers = begun(tmp_path / "scores", 3)
    owner = random.integers(0, 4, TOKENS)  # the fourth writes nothing
    for part in np.array_split(np.arange(TOKENS), 7):
        for number, writer in enumerate(writers):
            own = np.where(owner[part] == number, part, -1)
            writer.put(own, logprobs[part], tokens[part])
            writer.put(np.full(2, -1), logprobs[:2], tokens[:2])
    for writer in writers:
        writer.close()
    writers[0].finish()
    got, kinds = np.zeros((TOKENS, COUNT)), np.zeros((TOKENS, COUNT), np.int64)
    Scores(tmp_path / "scores", INDEX).fill(np.arange(TOKENS), got, kinds)
    written = (owner < 3)[:, None]
    np.testing.assert_array_equal(got, np.where(written, logprobs, 0))
    np.testing.assert_array_equal(kinds, np.where(written, tokens, 0))


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to mapped memory would end the process by a signal."""
    (writer,) = begun(tmp_path / "scores", 1)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match=r"logprobs\.bin\.part: cannot be written: No space left on device"):
        writer.put(np.arange(4), np.zeros((4, COUNT)), np.zeros((4, COUNT), np.int64))
