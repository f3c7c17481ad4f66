"""Why a device was idle, and the queue of launches, on profiles made by hand."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_jobs import Host, explained


def causes(tmp_path: Path, host: Host) -> dict[str, int]:
    """What there is of each cause."""
    answers = explained(tmp_path, {0: ("", host.events)})
    assert sum(answers.idle[0].values()) == answers.ranks[0]["idle"]
    return {cause: time for cause, time in answers.idle[0].items() if time}


def test_the_host_launches_late(tmp_path: Path) -> None:
    host = Host()
    host.launch("a", 0, 10, 10)
    host.launch("b", 50, 55, 10)  # idle from 20: launched at 50, began at 55
    assert causes(tmp_path, host) == {"host": 30, "device": 5}


def test_launched_in_time(tmp_path: Path) -> None:
    host = Host()
    host.launch("a", 0, 10, 10)
    host.launch("b", 5, 60, 10)
    assert causes(tmp_path, host) == {"device": 40}


def test_the_host_had_waited(tmp_path: Path) -> None:
    host = Host()
    host.launch("a", 0, 10, 10)
    host.span("cuda_runtime", "cudaStreamSynchronize", 5, 17)
    host.launch("b", 50, 55, 10)
    assert causes(tmp_path, host) == {"synchronisation": 30, "device": 5}


def test_data_comes_first(tmp_path: Path) -> None:
    host = Host()
    host.launch("a", 0, 10, 10)
    host.span("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 15, 20)
    host.launch("b", 50, 55, 10)
    assert causes(tmp_path, host) == {"data": 15, "host": 15, "device": 5}


def test_a_collective_of_the_host(tmp_path: Path) -> None:
    host = Host()
    host.launch("a", 0, 10, 10)
    host.span("user_annotation", "gloo:all_reduce", 20, 10, tid=9)
    host.span("user_annotation", "gloo:recv", 30, 10, tid=9)
    host.launch("b", 50, 55, 10)
    assert causes(tmp_path, host) == {"peer": 10, "pipeline": 10, "host": 10, "device": 5}


def test_what_was_not_recorded_is_unknown(tmp_path: Path) -> None:
    host = Host()
    host.step(0, 0, 100)
    host.launch("a", 0, 10, 10)  # nothing is known of the time before it
    host.span("cuda_runtime", "cudaGraphLaunch", 4, 1, correlation=77)
    host.launch("b", 8, 60, 10)  # after a graph that left no trace
    answers = explained(tmp_path, {0: ("", host.events)})
    assert {k: v for k, v in answers.idle[0].items() if v} == {"unknown": 10 + 40 + 30}
    assert any("1 launches" in said for said in answers.unseen)


gaps = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 60), st.integers(7, 8)), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=gaps)
def test_the_queue_against_a_count(tmp_path: Path, made: list[tuple[int, int, int, int]]) -> None:
    """Depth, delays and emptiness counted at every nanosecond."""
    host = Host()
    now, rows = 0, []
    for gap, length, ahead, stream in made:
        start = now + gap
        host.launch("k", start - ahead, start, length, stream)
        rows.append((start - ahead, start, start + length))
        now = start + length
    queue = explained(tmp_path, {0: ("", host.events)}).launches[0]
    low, high = min(row[0] for row in rows), max(row[2] for row in rows)
    depth = [sum(call <= t < start for call, start, _ in rows) for t in range(low, high)]
    assert queue.launches == len(rows)
    assert queue.deepest == max(depth)
    assert queue.longest_delay == max(start - call for call, start, _ in rows)
    assert queue.empty == sum(not any(call <= t < end for call, _, end in rows) for t in range(low, high))
    span = high - min(row[1] for row in rows)
    assert queue.mean_depth == sum(start - call for call, start, _ in rows) / span
