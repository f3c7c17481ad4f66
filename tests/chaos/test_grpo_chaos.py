"""A GRPO run whose ranks are killed again and again draws and learns what it would have, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from campaign import campaign_run

from shardwise.cli.main import main
from shardwise.run.write import sections_to_toml

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")
REWARD = "def vowels(prompt, completion, row):\n    return sum(c in row['wanted'] for c in completion) / 6\n"


@pytest.mark.large("thirty kills between and inside of rounds of answers; the small tier stops a run once at a step")
def test_thirty_kills_in_a_run_lose_nothing(tmp_path: Path) -> None:
    rows = [dict(prompt="abc"[n % 3] * (1 + n % 4), wanted="aeiou0123456789") for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARD)
    assert (
        main(["data", "build", "--chat", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "set"), "--json"]) == 0
    )
    train = dict(
        seq_len=12, global_batch=8, device="cpu", eval_every=0, keep=3, hang_seconds=20.0, restarts=1000, restart_wait=0.0,
        compare_every=0, lr=1e-2,
    )  # fmt: skip
    run = sections_to_toml(
        dict(
            name="tiny",
            model=dict(layers=2, hidden=16, heads=2, ffn=32),
            data=dict(sets=[str(tmp_path / "set")]),
            train=train,
            # Checkpoints, every two steps, fall into the middle of rounds.
            objective=dict(
                kind="grpo", rewards=[f"{tmp_path}/rewards.py:vowels"], group=4, completion_tokens=6, variant="dapo", iterations=3
            ),
            serve=dict(page_tokens=4, max_sequences=8),
        )
    )  # fmt: skip
    outcome = campaign_run(tmp_path, "2 ranks, shard", count=30, seed=5, kinds={"kill": 1}, quiet=True, run=run)
    assert outcome.same
    assert outcome.faults["kill"] >= 30
