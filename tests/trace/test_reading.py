"""What is read of a profile: exact times, every spelling of categories, ranks, groups, collectives, shapes, allocations."""

from __future__ import annotations

import gc
import json
import os
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_files import BASES, SPELLINGS, distributed, kernel, micro, read, span, text_of, write

from shardwise.run.problems import UserError
from shardwise.trace.reading import read as read_module
from shardwise.trace.reading.profile import CODE, KIND_OF_CATEGORY, KINDS
from shardwise.trace.reading.read import open_profiles
from shardwise.trace.reading.records import LIMIT, nanoseconds

TIMES = st.one_of(
    st.decimals(allow_nan=True, allow_infinity=True).map(str),
    st.integers(-(10**20), 10**20).map(str),
    st.integers(-(10**19), 10**19).map(micro),
    st.text("0123456789.-+eE", max_size=8),
    st.sampled_from(["", "null", "true", '"7.5"', "1e400"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(TIMES, max_size=6))
def test_times_are_exact(texts: list[str]) -> None:
    values, known = nanoseconds([text.encode() for text in texts])
    for text, value, is_time in zip(texts, values.tolist(), known.tolist(), strict=True):
        assert (is_time, value) == exactly(text), text


def exactly(text: str) -> tuple[bool, int]:
    """Whether a text is a time, and its nanoseconds, by arithmetic of fractions."""
    try:
        value = Decimal(text.strip('"'))
    except ArithmeticError:
        return False, 0
    if not value.is_finite() or value.adjusted() > 30:
        return False, 0
    rounded = 0 if value.adjusted() < -30 else round(Fraction(value) * 1000)
    return (True, rounded) if abs(rounded) < LIMIT else (False, 0)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("base", BASES)
def test_every_spelling_of_a_time(tmp_path: Path, base: int, spelling: str) -> None:
    times = [base + offset for offset in (0, 1, 999, 1000, 123_456_789)]
    events = [kernel("k", start, 7, spelling=spelling) for start in times]
    profile = read(tmp_path / "a.json", text_of(events))
    assert profile.events.start.tolist() == times
    assert set(profile.events.duration.tolist()) == {7}
    assert profile.problems == ()


def test_categories(tmp_path: Path) -> None:
    categories = [*KIND_OF_CATEGORY, "Trace", "something new", ""]
    profile = read(tmp_path / "a.json", text_of([span(c, f"n{i}", i, 1) for i, c in enumerate(categories)]))
    kinds = [KINDS[code] for code in profile.events.kind]
    assert kinds == [*KIND_OF_CATEGORY.values(), "other", "other", "other"]


def test_order_and_tracks(tmp_path: Path) -> None:
    """By start, of equal starts the longer first; a stream and a thread of the same numbers are two tracks."""
    events = [
        span("cpu_op", "inner", 5, 2),
        span("cpu_op", "outer", 5, 9),
        kernel("k", 3, 1),
        span("python_function", "f", 4, 1, pid=0, tid=7),
        '{"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}}',
    ]
    profile = read(tmp_path / "a.json", text_of(events))
    assert [profile.events.names[n] for n in profile.events.name] == ["k", "f", "outer", "inner"]
    tracks = [profile.events.tracks[n] for n in profile.events.track]
    assert [(track.process, track.thread, track.stream, track.device) for track in tracks] == [
        ("0", "7", 7, 0), ("0", "7", -1, -1), ("1", "1", -1, -1), ("1", "1", -1, -1)]  # fmt: skip


def test_numbers_of_events(tmp_path: Path) -> None:
    events = [span("cpu_op", "aten::mm", 1, 9, **{"External id": 4, "Sequence number": 11, "Fwd thread id": 2}),
              span("Runtime", "cudaLaunchKernel", 2, 1, correlation=77),
              kernel("k", 3, 1, correlation="77"), kernel("k", 4, 1, correlation=2**70)]  # fmt: skip
    found = read(tmp_path / "a.json", text_of(events)).events
    assert found.correlation.tolist() == [-1, 77, 77, -1]
    assert (found.sequence.tolist(), found.forward_thread.tolist()) == ([11, -1, -1, -1], [2, -1, -1, -1])


def test_messages_shapes_and_allocations(tmp_path: Path) -> None:
    collective = {"Collective name": "allreduce", "Process Group Name": "7", "Process Group Description": "tensor",
                  "dtype": "BFloat16", "In msg nelems": 10, "Out msg nelems": 20, "Group size": 2,
                  "Process Group Ranks": "[0, 1]", "Seq": 5}  # fmt: skip
    memory = {"ph": "i", "name": "[memory]", "ts": 9.5, "args": {"Bytes": -512, "Addr": 99, "Total Allocated": 1,
              "Total Reserved": 2, "Device Id": 0, "Device Type": 1}}  # fmt: skip
    shapes = {"Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"], "Concrete Inputs": ["", "1"]}
    events = [kernel("ncclKernel", 8, 1, **collective), span("cpu_op", "record_param_comms", 7, 1),
              span("cpu_op", "aten::add", 6, 1, **shapes), span("cpu_op", "aten::add", 5, 1, **shapes), json.dumps(memory),
              span("cpu_op", "c10d::send", 9, 1, **{"Collective name": "send", "Src Rank": 0, "Dst Rank": 3})]  # fmt: skip
    profile = read(tmp_path / "a.json", text_of(events))
    params = profile.comm_params
    assert params.event.tolist() == [2, 3, 4]
    assert params.collective[0] == -1
    assert [params.texts[text] for text in params.collective[1:]] == ["allreduce", "send"]
    assert [params.texts[column[1]] for column in (params.group, params.description, params.ranks)] == [
        "7",
        "tensor",
        "[0, 1]",
    ]
    assert (params.elements_in[1], params.elements_out[1], params.size[1], params.sequence[1]) == (10, 20, 2, 5)
    assert (params.source.tolist(), params.destination.tolist()) == ([-1, -1, 0], [-1, -1, 3])
    found = profile.shapes
    assert found.event.tolist() == [0, 1]
    assert found.decode(found.dims[0]) == [[2, 3], []]
    assert found.decode(found.types[1]) == ["float", "Scalar"]
    assert found.decode(found.values[1]) == ["", "1"]
    given_back = profile.allocations
    columns = (given_back.time, given_back.bytes, given_back.allocated, given_back.reserved, given_back.device)
    assert [column.tolist() for column in columns] == [[9500], [-512], [1], [2], [0]]


def test_what_stands_around_the_events(tmp_path: Path) -> None:
    """Before them or after them, as files of different ages have it."""
    devices = '"deviceProperties": [{"id": 0, "name": "H200", "totalGlobalMem": 150, "numSms": 132}], '
    base = '"baseTimeNanoseconds": 1751410836000000000, '
    members = distributed(5) + devices + base
    before = read(tmp_path / "a.json", text_of([kernel("k", 1, 2)], before=members))
    after = read(tmp_path / "b.json.gz", text_of([kernel("k", 1, 2)], after=", " + members.removesuffix(", ")))
    for profile in (before, after):
        assert (profile.rank, profile.world, profile.base) == (5, 8, 1751410836000000000)
        assert profile.groups["7"].description == "tensor"
        assert profile.groups["7"].ranks == (4, 5)
        assert profile.devices[0].name == "H200"
        assert profile.problems == ()


def test_a_bare_list_of_events(tmp_path: Path) -> None:
    text = ("\ufeff [" + kernel("k", 1, 2) + ",\n" + kernel("l", 5, 2) + "]").encode()
    profile = read(tmp_path / "rank_12.json", text)
    assert (profile.rank, profile.rank_known, len(profile.events), profile.problems) == (12, True, 2, ())


def test_ranks_of_a_job(tmp_path: Path) -> None:
    """Any subset of ranks; by what files say, else by their names, else by free numbers; two of one rank are said."""
    event = [kernel("k", 1, 2)]
    write(tmp_path / "job/one.json", text_of(event, before=distributed(6)))
    write(tmp_path / "job/deep/er/rank-00003.json.gz", text_of(event))
    write(tmp_path / "job/unknown.pt.trace.json", text_of(event))
    write(tmp_path / "job/twice.json.gz", text_of(event, before=distributed(6)))
    write(tmp_path / "job/profile.json", b'{"version": 1}')
    write(tmp_path / "job/run.toml", b"")
    write(tmp_path / "job/cut.json", text_of(event)[:-30])
    opened = open_profiles([tmp_path / "job"])
    assert [(p.rank, Path(p.path).name) for p in opened.profiles] == [
        (0, "unknown.pt.trace.json"), (3, "rank-00003.json.gz"), (6, "one.json")]  # fmt: skip
    assert len(opened.problems) == 2
    assert any("twice.json.gz: says it is rank 6" in problem for problem in opened.problems)
    assert any("cut.json: ends" in problem for problem in opened.problems)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no profile found"):
        open_profiles([tmp_path])
    with pytest.raises(UserError, match="no such file"):
        open_profiles([tmp_path / "missing"])
    other = write(tmp_path / "profile.json", b'{"version": 1}')
    with pytest.raises(UserError, match="no profile found"):
        open_profiles([tmp_path])
    with pytest.raises(UserError, match="no list of traceEvents"):
        open_profiles([other])


def test_progress(tmp_path: Path) -> None:
    for files in (1, 3):
        paths = [write(tmp_path / f"{files}/rank{n}.json.gz", text_of([kernel("k", 1, 2)] * 50)) for n in range(files)]
        seen: list[tuple[int, int]] = []
        open_profiles(paths, progress=lambda done, total, seen=seen: seen.append((done, total)))
        size = sum(path.stat().st_size for path in paths)
        assert seen[-1] == (size, size)
        assert np.all(np.diff([done for done, _ in seen]) >= 0)


def test_codes_are_stable() -> None:
    """They are kept in caches; a change of them needs a new format of the cache."""
    assert dict(CODE) == {"cpu_op": 0, "annotation": 1, "runtime": 2, "kernel": 3, "copy": 4, "set": 5, "gpu_annotation": 6,
                          "sync": 7, "python": 8, "other": 9}  # fmt: skip


class Garbage:
    """Part of a cycle that only the collector frees; says in which process that happened."""

    def __init__(self, file: Path) -> None:
        self.me, self.file = self, file

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


def collect_and_read(*args: Any, **keys: Any) -> Any:
    gc.collect()
    return plain_read(*args, **keys)


plain_read = read_module._read


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_a_process_that_reads_does_not_free_what_its_parent_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is freed may be a process group, whose destructor waits for threads that a forked process does not have.
    monkeypatch.setattr(read_module, "_read", collect_and_read)
    monkeypatch.setattr(read_module, "_cores", lambda: 2)
    paths = [
        write(tmp_path / f"rank-{rank}.json", text_of([kernel("gemm", 1, 2)], distributed(rank, 2))) for rank in (0, 1)
    ]
    freed = tmp_path / "freed"
    gc.disable()
    try:
        Garbage(freed)
        found = open_profiles(paths)
        assert not freed.exists()
    finally:
        gc.enable()
    assert len(found.profiles) == 2
    gc.collect()
    assert freed.read_text().split() == [str(os.getpid())]
