"""A small part of the fault campaign, one fault of each kind on two ranks; the whole of it is `make chaos`."""

from __future__ import annotations

import re
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from campaign import KINDS, Outcome
from patience import HANG_SECONDS

from shardwise.train.faults.goodput import read_events

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")


def test_a_run_that_suffers_every_kind_of_fault_ends_as_if_nothing_had_been(
    campaign: Future[tuple[Path, Outcome]],
) -> None:
    folder, outcome = campaign.result(HANG_SECONDS)
    assert outcome.same
    assert set(outcome.faults) == set(KINDS)
    assert outcome.noticed == outcome.faults["flip a bit"] + outcome.faults["truncate"]
    said = (folder / "disturbed" / "said").read_text()
    assert "was killed by SIGKILL; all ranks are stopped, going on from step" in said
    assert re.search(r"no progress for \d+ s: rank", said)
    assert "its process is stopped by a signal" in said
    assert "stop requested: the run can be resumed" in said
    assert outcome.unsaved
    events = read_events(folder / "disturbed" / "out")
    assert {e["what"] for e in events} >= {"begin", "training", "failed", "hang", "repeat", "saved", "end"}
    # The rank that was waited for is named, and the others left their stacks.
    hang = next(e for e in events if e["what"] == "hang")
    assert "did not arrive at" in hang["why"] or "gives no sign of life" in hang["why"]
    logs = [path.read_text() for path in (folder / "disturbed" / "out" / "logs").glob("rank-*.log")]
    assert any("most recent call first" in log for log in logs)
