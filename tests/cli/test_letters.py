"""On a terminal without UTF-8 nothing is a question mark."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PLAN = ["plan", "--model.preset=llama3-8b", "--cluster.chip=mi300x", "--layout.shard=4", "--layout.pipeline=2",
        "--layout.schedule=zb-v", "--train.dtype=bfloat16", "--train.microbatch=1", "--train.seq_len=4096"]  # fmt: skip


@pytest.mark.parametrize("words", [PLAN, ["config", "--chips"], ["plan", "--help"]], ids=lambda words: words[0])
def test_every_letter_has_a_plain_one(words: list[str]) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *words], capture_output=True, env=environment, check=False
    )
    shown = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr
    assert "?" not in shown
    if words is PLAN:
        assert "shard 4 x pipeline 2" in shown
        assert "zb-v x 2" in shown
        assert "1.31 PFLOP/s" in " ".join(shown.split())
