"""The account of a run's life: when it is restarted, who did not arrive, who is slow, and where the time went."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.train.faults import heartbeat
from shardwise.train.faults.agent import Restarts
from shardwise.train.faults.goodput import goodput, read_events, record_event
from shardwise.train.faults.heartbeat import (
    GroupProgress,
    Heartbeat,
    HeartbeatThread,
    ProgressMonitor,
    explain,
    missing,
    read_heartbeat,
)
from shardwise.train.faults.ranks import DOUBLINGS, environment_of
from shardwise.train.progress.speed import Comparison, busy_seconds


def test_a_run_that_advances_may_fail_forever_and_one_that_does_not_is_given_up() -> None:
    restarts = Restarts(limit=3, wait=0.5)
    assert [restarts.after_failure(step) for step in range(0, 1000, 10)] == [0.5] * 100
    assert [restarts.after_failure(990) for _ in range(3)] == [1.0, 2.0, None]
    assert Restarts(limit=0, wait=1.0).after_failure(-1) is None
    patient = Restarts(limit=100, wait=1.0)
    assert [patient.after_failure(-1) for _ in range(100)][-1] == 2**DOUBLINGS


def beat(rank: int, *groups: GroupProgress) -> Heartbeat:
    return Heartbeat(rank, count=9, step=4, phase="training", idle=7.0, groups=list(groups))


def test_the_rank_that_waits_for_nobody_is_the_one_that_did_not_arrive() -> None:
    def at(axis: str, group: str, begun: int, waits: bool) -> GroupProgress:
        return GroupProgress(axis, group, begun, begun if waits else 0, "all_gather", 7.0)

    # Ranks 0 and 1 are tensor partners, so are 2 and 3; 0 and 2, 1 and 3 share data. Rank 3 stands still.
    beats = [
        beat(0, at("tensor", "t0", 17, True), at("zero", "z0", 5, False)),
        beat(1, at("tensor", "t0", 16, False), at("zero", "z1", 6, True)),
        beat(2, at("tensor", "t1", 17, True), at("zero", "z0", 5, False)),
        beat(3, at("tensor", "t1", 16, False), at("zero", "z1", 5, False)),
    ]
    found = missing(beats, [])
    assert [(rank, wait.axis) for rank, wait in found] == [(3, "zero")]
    assert "rank 3 did not arrive at all_gather number 6 of axis shard, where others have waited for 7 s" in explain(
        beats, []
    )
    # Of a rank that is silent the last word may be old, but it says what it had not begun.
    assert [rank for rank, _ in missing(beats, [3])] == [3]
    owed = GroupProgress("pipeline", "message", waits_for=1, collective="activation of stage 0, microbatch 2", sender=0)
    assert "rank 0 did not send the activation of stage 0, microbatch 2, along axis pipeline" in explain(
        [beat(0), beat(1, owed)], []
    )
    assert "rank 1 gives no sign of life" in explain([beat(0)], [1])
    assert "no rank waits for another" in explain([beat(0)], [])


def test_a_heartbeat_goes_on_while_nothing_else_happens_and_names_the_phase(tmp_path: Path) -> None:
    thread = HeartbeatThread(
        tmp_path, rank=3, world=4, hang_seconds=0.4
    )  # a beat every 50 ms, blamed after a minute of start-up
    with thread:
        while read_heartbeat(tmp_path, 3) is None:  # its pace is set by now
            thread.join(0.01)
        thread.limit = 1e6
        thread.step, thread.phase = 5, "evaluation"
        while (found := read_heartbeat(tmp_path, 3)) is None or found.count < 3 or found.step != 5:
            thread.join(0.01)
    assert (found.rank, found.process, found.phase) == (3, os.getpid(), "evaluation")
    (tmp_path / "rank-3.beat").write_text('{"rank": 3, "ste')
    assert read_heartbeat(tmp_path, 3) is None


def test_bytes_are_progress_and_whoever_waits_for_them_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(HeartbeatThread, "_exit", lambda thread, why: ended.append(thread.rank))
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)  # which stands while a busy machine does
    monkeypatch.setattr(heartbeat, "time", clock)
    writes, waits = (HeartbeatThread(tmp_path, rank, world=2, hang_seconds=0.04) for rank in range(2))

    def both_have_looked() -> None:
        before = [beats(rank) for rank in range(2)]
        while any(beats(rank) < count + 2 for rank, count in enumerate(before)):
            time.sleep(0.001)

    def beats(rank: int) -> int:
        while (found := read_heartbeat(tmp_path, rank)) is None:  # not yet there, or just being written
            time.sleep(0.001)
        return found.count

    with writes, waits:
        for thread in (writes, waits):
            thread.step, thread.phase = 5, "saving"
        for _ in range(20):  # five times the limit, and more than the threads would wait
            both_have_looked()
            writes.bytes_done += 4096
            clock.now += 0.01
        both_have_looked()
        assert not ended
        for _ in range(20):
            clock.now += 0.01
            both_have_looked()
    assert set(ended) == {0, 1}


def test_a_heartbeat_that_does_not_change_is_no_sign_of_progress(tmp_path: Path) -> None:
    lookout = ProgressMonitor(tmp_path, hang_seconds=0.2)
    assert not lookout.somebody_moves(4)
    (tmp_path / "rank-3.beat").write_text(json.dumps(asdict(Heartbeat(3, count=7, phase="saving"))))
    assert lookout.somebody_moves(4)
    time.sleep(0.3)
    assert not lookout.somebody_moves(4)
    (tmp_path / "rank-3.beat").write_text(json.dumps(asdict(Heartbeat(3, count=8, phase="saving"))))
    assert lookout.somebody_moves(4)
    (tmp_path / "rank-3.beat").write_text(json.dumps(asdict(Heartbeat(3, count=9, phase="saving", idle=0.3))))
    assert not lookout.somebody_moves(4)


def test_the_slowest_rank_is_named_when_it_matters() -> None:
    assert Comparison([1.0, 1.05, 1.1, 1.0]).sentence() is None
    slow = Comparison([1.0, 1.0, 2.0, 1.0])
    assert slow.sentence() == "rank 2 computes 2.00 times as long as the median rank"
    before = busy_seconds()
    while busy_seconds() < before + 0.01:
        pass


def test_events_survive_torn_lines(tmp_path: Path) -> None:
    record_event(tmp_path, "begin", ranks=2)
    with (tmp_path / "events.jsonl").open("a") as f:
        f.write('[1]\n{"time": 3, "wh')
    record_event(tmp_path, "end")
    assert [e["what"] for e in read_events(tmp_path)] == ["begin", "end"]
    record_event(tmp_path / "nowhere", "begin")  # an account that cannot be written ends no run


def test_every_second_of_a_run_s_life_is_accounted_for() -> None:
    events: list[dict[str, Any]] = [
        dict(time=100.0, what="begin"),
        dict(time=110.0, what="training"),
        dict(time=120.0, what="saved", seconds=1.0),
        dict(time=140.0, what="hang", seconds=8.0),
        dict(time=141.0, what="failed"),
        dict(time=144.0, what="begin", restart=True),
        dict(time=150.0, what="repeat", seconds=4.0),
        dict(time=150.0, what="training"),
        dict(time=160.0, what="evaluated", seconds=2.0),
        dict(time=170.0, what="end"),
        dict(time=270.0, what="begin"),
        dict(time=275.0, what="training"),
        dict(time=285.0, what="saved", seconds=0.5),
    ]
    metrics = [dict(seconds=3.0)] * 10 + [dict(seconds=3.0, skipped=True), dict(step=1)]
    account = goodput(events, metrics, now=290.0)
    assert account.total == (141 - 100) + 3 + (170 - 144) + (290 - 270)
    assert (account.useful, account.away, account.failures) == (30.0, 100.0, 1)
    named = {k: v for k, v in account.lost.items() if k != "other"}
    assert named == {
        "start-up": 10 + 6 + 5,
        "checkpoints": 1.5,
        "evaluation": 2.0,
        "skipped": 3.0,
        "repeated": 4.0,
        "hangs": 8.0,
        "restarts": 3.0,
    }
    assert account.useful + sum(account.lost.values()) == pytest.approx(account.total)
    assert account.record()["goodput"] == pytest.approx(30 / 90, abs=1e-6)
    assert "1 failure; lost: start-up 21s (23.3%)" in account.sentence()


def refused(at: float, command: str) -> list[dict[str, Any]]:
    """The events of a start that finds the folder in use."""
    begin, end = dict(time=at, what="begin", restart=False), dict(time=at + 2, what="failed", code=2)
    return [event | (dict(command=command) if command else {}) for event in (begin, end)]


@pytest.mark.parametrize("named", [True, False], ids=["events say whose they are", "older files"])
def test_starts_that_met_in_one_folder_count_their_common_time_once(named: bool) -> None:
    """Three starts while one trains: it goes on, and the time they were up is not the run's whole life."""
    mine = dict(command="a-1") if named else {}
    run: list[dict[str, Any]] = [
        dict(time=0.0, what="begin") | mine,
        dict(time=10.0, what="training") | mine,
        dict(time=60.0, what="saved", seconds=1.0) | mine,
        dict(time=100.0, what="saved", seconds=1.0) | mine,
    ]
    others = [*refused(12.0, "a-2" * named), *refused(12.5, "a-3" * named), *refused(70.0, "b-1" * named)]
    events = sorted([*run, *others], key=lambda event: event["time"])
    account = goodput(events, [dict(seconds=8.0)] * 10, now=100.0, command="a-1" * named)
    if named:
        assert account.useful + sum(account.lost.values()) == pytest.approx(account.total)
        assert (account.total, account.useful, account.lost["start-up"], account.away) == (100.0, 80.0, 10.0, 0.0)
    else:  # when the other start came is known, and not since when nothing had happened
        assert (account.useful, account.total) == (80.0, pytest.approx(100.0, abs=15.0))


def test_a_killed_command_lived_until_its_last_record_and_others_do_not_change_that() -> None:
    events: list[dict[str, Any]] = [
        dict(time=0.0, what="begin", command="a"),
        dict(time=5.0, what="training", command="a"),
        *refused(7.0, "b"),
        dict(time=100.0, what="begin", command="c"),
        dict(time=101.0, what="repeat", seconds=20.0, heard=30.0, command="c"),
        dict(time=102.0, what="training", command="c"),
        dict(time=110.0, what="saved", seconds=0.0, command="c"),
    ]
    account = goodput(events, [dict(seconds=8.0)], now=110.0, command="c")
    assert (account.total, account.away, account.failures) == (30.0 + 10.0, 70.0, 1)
    assert account.useful + sum(account.lost.values()) == pytest.approx(account.total)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(("begin", "training", "saved", "end", "failed")))))
def test_goodput_is_never_more_than_all_time(happened: list[tuple[str, str]]) -> None:
    events = [dict(time=float(n), what=w, command=c, seconds=0.0) for n, (c, w) in enumerate(happened)]
    account = goodput(events, [dict(seconds=1000.0)], now=float(len(events)))
    assert 0.0 <= account.share <= 1.0
    assert 0.0 <= account.total <= len(events)
    assert account.away >= 0.0


def test_the_events_of_ranks_name_the_command_that_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_event(tmp_path, "begin")
    monkeypatch.setenv("SHARDWISE_COMMAND", environment_of(0, 0, 1, 1, "", 1)["SHARDWISE_COMMAND"])
    monkeypatch.setattr(os, "getpid", lambda: -1)  # the rank is another process
    record_event(tmp_path, "training")
    one, other = read_events(tmp_path)
    assert one["command"] == other["command"]
    monkeypatch.delenv("SHARDWISE_COMMAND")
    record_event(tmp_path, "begin")
    assert read_events(tmp_path)[-1]["command"] != one["command"]


@given(st.floats(0.0, 1e3), st.integers(0, 5))
def test_a_session_that_was_cut_off_ends_with_its_last_sign_of_life(length: float, more: int) -> None:
    events = [dict(time=0.0, what="begin"), dict(time=0.0, what="training")]
    events += [dict(time=length, what="saved", seconds=0.0)] * more
    events += [dict(time=5000.0, what="begin", heard=length), dict(time=5001.0, what="end")]
    account = goodput(events, [], now=9000.0)
    assert account.total == pytest.approx(length + 1.0)
    assert account.away == pytest.approx(5000.0 - length)
