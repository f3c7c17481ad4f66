"""Shared by all tests: the two tiers, the seed, and one thread, so that numbers repeat and test processes do not fight for cores.

`pytest` runs the small tier: every axis, schedule, model family, fault kind and message. `pytest --large` adds the tests marked
`large`, each with what it finds that the small tier does not. What is drawn at random follows from the commit, so that coverage
grows with history; pytest says the seed at its end, and `--seed` repeats it. Property tests draw the same examples every time
(`--hypothesis-profile=default` draws others), the large tier up to seven times as many.

Of the cases of a test marked `drawn(n)` the small tier takes n, others with every commit (`drawing.py`). The large tier takes them
all, and so does a test that is asked for by name (`file::test`, `-k`).
"""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawing import cases_not_drawn, cases_not_shared
from hypothesis import settings
from interpreted_kernels import Interpreter
from parallel_pool import RankPool
from workers import place_of, scope_of

EXAMPLES = 20
"""The most that a property test draws in the small tier."""
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=15)
settings.register_profile("thorough", derandomize=True, deadline=None)
settings.load_profile("repeatable")

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="run the large tier too")
    parser.addoption(
        "--share",
        type=float,
        default=1.0,
        help="of the cases of the large tier, and of its campaigns; others with others",
    )
    parser.addoption("--seed", type=int, help="of what is drawn at random; that of the commit if left out")
    parser.addoption("--layouts", type=int, default=60, help="how many random layouts the large tier runs")
    parser.addoption(
        "--pairs",
        type=int,
        default=8,
        help="random pairs of layouts to save on and resume on; the small tier takes one",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.large and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("thorough")
    config.addinivalue_line(
        "markers",
        "large(finds): for the large tier; what it finds that the small one does not; campaign=True: takes minutes, one in so many",
    )
    config.addinivalue_line(
        "markers", "drawn(n, *each): the small tier draws n cases, with each value of these parameters"
    )
    if config.option.seed is None:
        # A worker has the seed of the process that started it, whatever is checked out meanwhile.
        config.option.seed = getattr(config, "workerinput", {}).get("seed") or seed_of_the_commit()
    if worker := getattr(config, "workerinput", None):
        begin_elsewhere(config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def begin_elsewhere(config: pytest.Config, worker: int, workers: int) -> None:
    """Let each worker begin to collect in another folder. In a fresh clone the first to come compiles a test file, which takes
    longer than to import it; in the same order all would compile all of them side by side."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        folders = sorted(str(path) for path in (ROOT / "tests").iterdir() if path.is_dir() or path.match("test_*.py"))
        first = worker * len(folders) // workers
        config.args = folders[first:] + folders[:first]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.option.seed


def seed_of_the_commit() -> int:
    """A number made from the commit that is checked out; 0 outside of a repository."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(commit[:8], 16)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tier = "both tiers" if config.option.large else "the small tier (--large for all)"
    terminalreporter.write_line(f"{tier}; what is random is this commit's, repeat it with --seed {config.option.seed}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Say what stays together on one worker. (Groups by mark, `--dist loadgroup`, do nothing with pytest 9.2 and xdist 3.8.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Together(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other tier. Long files begin first, single runs of ranks fill the end."""
    # What is drawn follows from the order, which is to be that of every worker.
    items.sort(key=lambda item: place_of(item.path.relative_to(ROOT / "tests").as_posix()))
    for item in items:
        for mark in item.iter_markers("large"):
            assert mark.args, f"{item.nodeid}: say what the large tier finds by it"
    if not config.option.large:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("large")])
        items[:] = [item for item in items if not item.get_closest_marker("large")]
        if not config.option.keyword and not any("::" in argument for argument in config.args):
            fewer_examples(items)
            left_out = cases_not_drawn(items, config.option.seed)
            config.hook.pytest_deselected(items=[item for item in items if item in left_out])
            items[:] = [item for item in items if item not in left_out]
    elif config.option.share < 1:
        left_out = cases_not_shared(items, config.option.seed, config.option.share)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def fewer_examples(items: list[pytest.Item]) -> None:
    """Property tests that ask for many examples get them in the large tier."""
    for item in items:
        test = getattr(item, "obj", None)
        asked = getattr(test, "_hypothesis_internal_use_settings", None)
        if asked is not None and asked.max_examples > EXAMPLES:
            test._hypothesis_internal_use_settings = settings(asked, max_examples=EXAMPLES)  # type: ignore[union-attr]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Triton's bindings list what is left of them when the interpreter ends, hundreds of lines that say nothing of the tests."""
    if "triton" in sys.modules:
        atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for distributed tests, started once."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Kernels without a GPU, by Triton's interpreter."""
    pytest.importorskip("triton")
    found = Interpreter()
    yield found
    found.close()


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
        # What a killed process has written is there; fsync is for machines that lose their power, and waits for a disk.
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(os, "fdatasync", lambda handle: None)
        yield
