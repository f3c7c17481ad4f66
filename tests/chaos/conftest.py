"""The campaign of the small tier mostly waits: for ranks to start, to be missed, to be started again. It begins before the first
test of this folder, and `test_every_fault.py` looks at it after the last of those that `WAITING` of `tests/workers.py` names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from campaign import KINDS, Outcome, campaign_run


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[tuple[Path, Outcome]]]:
    """One fault of each kind, with the folder of the run that suffers them."""
    folder = tmp_path_factory.mktemp("campaign")

    def suffer() -> tuple[Path, Outcome]:
        kinds = dict.fromkeys(KINDS, 1)
        return folder, campaign_run(folder, "2 ranks, shard", count=13, seed=155, kinds=kinds, quiet=True)

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(suffer)


@pytest.fixture(autouse=True, scope="session")
def _begin_the_campaign(request: pytest.FixtureRequest) -> None:
    if any("campaign" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("campaign")
