"""What the agent of a machine decides by itself, without processes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

from shardwise.run.config import TrainConfig
from shardwise.train.faults import agent as module
from shardwise.train.faults.agent import Agent


def test_a_back_off_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that come after a failure was overcome need not wait for it once more."""
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(SimpleElasticAgent, "_restart_workers", lambda self, group: None)
    spec = WorkerSpec("rank", 1, mock.Mock(), entrypoint="python", max_restarts=1)
    agent = Agent(spec, TrainConfig(restart_wait=5.0), tmp_path, mock.Mock(), lambda world: [], lambda: -1)
    agent._failed(0, 1, "it fell over")
    for _ in range(2):
        agent._restart_workers(mock.Mock())
    assert slept == [5.0, 0.0]
