"""Who records what behind the last step, where the replica that writes for all dies there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardwise.parallel.members import Members
from shardwise.run import run_from_dict
from shardwise.train.elastic import SharedMetrics
from shardwise.train.progress.metrics import Metrics, read_metrics


def test_another_records_the_evaluation_and_no_step_twice(tmp_path: Path) -> None:
    run = run_from_dict({})
    dead = Metrics(tmp_path, run, print, 0)
    for step in (1, 2, 3):
        dead.record(step=step, loss=1.0 / step)
    dead.close()
    elastic: Any = SimpleNamespace(first=False, members=SimpleNamespace(count=1), whole=run)
    shared = SharedMetrics(elastic, tmp_path, print, None)
    for step in (2, 3):
        shared.record(step=step, loss=1.0 / step)
    elastic.first = True
    shared.record(step=3, eval_loss=0.5)
    shared.close()
    found = read_metrics(tmp_path)
    assert [each["step"] for each in found if "loss" in each] == [1, 2, 3]
    assert [(each["step"], each["eval_loss"]) for each in found if "eval_loss" in each] == [(3, 0.5)]


def test_who_is_told_to_finish_writes_for_all() -> None:
    for told in (True, False):
        members: Any = object.__new__(Members)
        members.writes, members.ask = not told, lambda what, told=told: dict(write=told)
        assert members.finish() is told
        assert members.writes is told
