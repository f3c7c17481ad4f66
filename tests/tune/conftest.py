"""Prompts with a small task, rewards for it, and runs that learn it."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_runs import make_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set of prompts and a file of rewards."""
    return make_task(tmp_path_factory.mktemp("task"))
