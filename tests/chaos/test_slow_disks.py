"""A disk that is slow is no hang, one that is stuck is: a save that takes far longer than `train.hang_seconds` goes on as long as
bytes arrive, and one that does not is ended and made again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from campaign import RUN, checksums, losses, prepare, start
from patience import HANG_SECONDS

from shardwise.train.faults.goodput import read_events

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")


@pytest.mark.large("real ranks on a slow and on a stuck disk; the small tier has the heartbeats alone")
def test_a_slow_save_survives_and_a_stuck_one_is_killed(tmp_path: Path) -> None:
    layout, steps = {"shard": 2}, 6
    # The file of a rank has some 80 KB, and `hang_seconds` is 4: ten seconds of trickling on one rank, for which the other waits.
    slow = dict(id=0, kind="slow disk", rank=1, step=2, delay=0.0, bytes=4096, seconds=0.5)
    stuck = dict(id=1, kind="stuck disk", rank=1, step=5, delay=0.0)
    for folder, faults in ((tmp_path / "quiet", []), (tmp_path / "slow", [slow]), (tmp_path / "stuck", [stuck])):
        prepare(folder, RUN, faults)
        process = start(folder, layout, steps)
        assert process.wait(HANG_SECONDS) == 0, (folder / "said").read_text()
        assert losses(folder) == losses(tmp_path / "quiet")
        assert checksums(folder) == checksums(tmp_path / "quiet")
    events = {name: read_events(tmp_path / name / "out") for name in ("slow", "stuck")}
    happened = {name: [event["what"] for event in found] for name, found in events.items()}
    waited = max(event["seconds"] for event in events["slow"] if event["what"] == "saved")
    assert waited > 8
    assert "hang" not in happened["slow"]
    assert happened["slow"].count("begin") == 1
    assert happened["stuck"].count("hang") == 1
    assert happened["stuck"].count("begin") == 2
