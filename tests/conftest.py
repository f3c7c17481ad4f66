"""Shared by all tests: one thread, so that numbers repeat and test processes do not fight for cores; property tests draw the same
examples every time (`--hypothesis-profile=default` draws others)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from parallel_pool import RankPool

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layouts", type=int, default=60, help="how many random layouts to hold against one process")
    parser.addoption("--pairs", type=int, default=6, help="how many random pairs of layouts to save on and resume on")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("parallel", "measure", "chaos"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for distributed tests, started once."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True, scope="session")
def _quiet_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    # Memory is counted after collecting what is left behind. What is imported by now stays, and is not looked through each time.
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        # The built-in corpus is cached for the tests alone, so that they build it themselves.
        cache: Path = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield
