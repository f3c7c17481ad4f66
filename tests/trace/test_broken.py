"""Whatever is in a file: no traceback, no hang, a sentence that names the file, and all the rest is still read."""

from __future__ import annotations

import gzip
import json
import random
import resource
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_files import device_events, distributed, kernel, span, step, text_of, write

from shardwise.cli.main import main
from shardwise.trace.reading import text as text_module
from shardwise.trace.reading.profile import Profile
from shardwise.trace.reading.read import NoProfile, open_profiles, read_profile
from shardwise.trace.spans.activity import activity_of
from shardwise.trace.spans.steps import break_down, select_steps

EVENTS = [kernel(f"kernel {n}", 1000 * n, 500, correlation=n) for n in range(40)]


def attempt(path: Path, text: bytes) -> Profile | str:
    """Read a file and break its time down, or the sentences that refuse it."""
    write(path, text)
    try:
        profile = read_profile(path)
    except NoProfile as e:
        refusal = e
    else:
        refusal = None
    if refusal:
        assert refusal.problems
        assert all(str(path) in str(problem) for problem in refusal.problems)
        return str(refusal)
    assert all(problem.startswith(str(path)) for problem in profile.problems)
    activity = activity_of(profile)
    result = break_down(activity, select_steps(activity).windows)
    assert result.span >= result.idle >= 0
    return profile


def broken(tmp_path: Path, text: bytes, kept: int, *words: str) -> Profile:
    """Read a file of which so many events are left, and find these words in what is said of it."""
    profile = attempt(tmp_path / "broken.json", text)
    assert isinstance(profile, Profile), profile
    assert len(profile.events) == kept, profile.problems
    said = " ".join(profile.problems)
    assert all(word in said for word in words), said
    return profile


def test_cut_off_json(tmp_path: Path) -> None:
    whole = text_of(EVENTS, before=distributed(3))
    cut = whole.index(b"kernel 30")
    profile = broken(tmp_path, whole[:cut], 30, "ends in the middle of an event", f"byte {cut} ", "cut off")
    assert profile.rank == 3
    broken(
        tmp_path,
        whole[: whole.index(b"kernel 30") - len('{"ph": "X", "cat": "kernel", "name": "')],
        30,
        "ends before its list",
    )


@pytest.mark.drawn(group="broken traces")
def test_cut_off_anywhere(tmp_path: Path) -> None:
    whole = text_of(EVENTS[:3], before=distributed(3))
    for cut in range(len(whole)):
        result = attempt(tmp_path / "cut.json", whole[:cut])
        complete = sum(whole[:cut].count(text.encode()) for text in EVENTS[:3])
        assert (len(result.events) if isinstance(result, Profile) else 0) == complete
        if isinstance(result, Profile) and cut < whole.rindex(b"]"):
            assert result.problems


@pytest.mark.drawn(group="broken traces")
def test_cut_off_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(text_of([kernel(f"k{random.Random(n).random()}", n, 1) for n in range(5000)]))
    path = tmp_path / "cut.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    profile = read_profile(path)
    assert 1000 < len(profile.events) < 4000
    assert "gzip stream ends too early" in profile.problems[0]
    assert str(len(packed) // 2) in profile.problems[0]
    damaged = bytearray(packed)
    damaged[len(packed) // 2 : len(packed) // 2 + 40] = bytes(40)
    path.write_bytes(bytes(damaged))
    profile = read_profile(path)
    assert len(profile.events) > 1000
    assert "cut.json.gz" in profile.problems[0]


def test_gzip_members_and_padding(tmp_path: Path) -> None:
    whole = text_of(EVENTS)
    path = tmp_path / "two.json.gz"
    path.write_bytes(gzip.compress(whole[:900]) + gzip.compress(whole[900:]) + bytes(100))
    assert (len(read_profile(path).events), read_profile(path).problems) == (40, ())


@pytest.mark.parametrize(
    ("event", "kept", "words"),
    [
        ('{"ph": "X", "cat": "kernel", "ts": 1, "dur": 2}', 2, "no name"),
        ('{"ph": "X", "name": "x", "cat": "kernel", "dur": 2}', 2, "no time"),
        ('{"ph": "X", "name": "x", "cat": "kernel", "ts": {}, "dur": 2}', 2, "no time"),
        ('{"name": "x", "ts": 1, "dur": 2}', 2, "no phase"),
        ('{"ph": "X", "name": "x", "cat": "kernel", "ts": 1}', 3, "no duration"),
        ('{"ph": "X", "name": "x", "cat": "kernel", "ts": 1, "dur": -2}', 3, "negative duration"),
        ('{"ph": "X", "name": "x", "cat": "kernel", "ts": NaN, "dur": 2}', 2, "no time"),
        ('{"ph": "X", "name": "x", "cat": "kernel", "ts": 1e300, "dur": 2}', 2, "no time"),
        ('{"ph": "X", "name": "x", "cat": "kernel", "ts": 1, "dur": inf}', 3, "no duration"),
        ('{"ph": "X", "name": 5, "cat": ["kernel"], "pid": {}, "tid": null, "ts": "1", "dur": "2", "args": 7}', 3, ""),
        ('{"ph": "X", "name": "x", "ts": 1, "dur": 2, "args": {"correlation": "a", "stream": [], "Seq": 1e999}}', 3, ""),
        ('{"ph": "X", "name": "x", "ts": 1, "dur": 2, "args": {"memory bandwidth (GB/s)": -inf, "b": nan}}', 3, ""),
        ('{"ph": "X", "name": "C:\\Users\\x", "ts": 1, "dur": 2}', 3, ""),
        ('{"ph": "Q", "name": "x", "ts": 1, "dur": 2}', 2, ""),
        ('{"ph": "X", "name": "x" "ts": 1, "dur": 2}', 2, "could not be read"),
        ('{"ph": "X", "name": "x, "ts": 1, "dur": 2}', 2, "could not be read"),
        ('{"ph": "X", "name": "x", "ts": 1, "dur": 2', 2, "could not be read"),
        ('"ph": "X", "name": "x", "ts": 1, "dur": 2}', 2, "could not be read"),
        ("null", 2, "could not be read"),
        ("5", 2, "could not be read"),
        ('"a string"', 2, "could not be read"),
        ("{}", 2, "no phase"),
        ("", 2, ""),
        ("\x00\x01\x02", 2, "could not be read"),
    ],
)  # fmt: skip
def test_one_bad_event(tmp_path: Path, event: str, kept: int, words: str) -> None:
    """Around it everything is read."""
    broken(tmp_path, text_of([kernel("before", 1, 2), event, kernel("after", 5, 2)]), kept, words)


def test_bytes_that_are_no_letters(tmp_path: Path) -> None:
    text = text_of([kernel("before", 1, 2), kernel("NAME", 3, 1), kernel("after", 5, 2)]).replace(
        b"NAME", b"\xff\xc3 \xe2\x82"
    )
    profile = broken(tmp_path, text, 3)
    assert any(name.startswith("??") for name in profile.events.names)


def test_duplicate_ids(tmp_path: Path) -> None:
    same = [
        kernel("k", 1, 2, correlation=5),
        kernel("k", 1, 2, correlation=5),
        span("cuda_runtime", "l", 0, 1, correlation=5),
    ]
    broken(tmp_path, text_of(same), 3)
    twice = b'{"ph": "X", "ph": "X", "name": "a", "name": "b", "cat": "kernel", "ts": 1, "ts": 2, "dur": 1}'
    broken(tmp_path, b"[" + twice + b"]", 1)


@pytest.mark.parametrize(("opening", "closed"), [("[", True), ('{"a":', False)])
def test_a_hundred_thousand_levels_deep(tmp_path: Path, opening: str, closed: bool) -> None:
    deep = opening * 10**5 + ("1" + {"[": "]", "{": "}"}[opening[0]] * 10**5 if closed else "")
    event = '{"ph": "X", "name": "deep", "ts": 1, "dur": 2, "args": {"x": ' + deep + ("}}" if closed else "")
    text = text_of([kernel("before", 1, 2), event, kernel("after", 5, 2)])
    profile = attempt(tmp_path / "deep.json", text)
    assert isinstance(profile, Profile)
    assert "before" in profile.events.names
    assert profile.problems
    if closed:
        assert "after" in profile.events.names
    assert isinstance(attempt(tmp_path / "only.json", deep.encode()), str)
    before = attempt(tmp_path / "head.json", text_of([kernel("k", 1, 2)], before=f'"x": {deep}, ')) if closed else None
    assert before is None or isinstance(before, Profile)


@pytest.mark.drawn(group="broken traces")
def test_gigantic_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than any event may be (here: 3 MB), in a name, before the events and after them."""
    monkeypatch.setattr(text_module, "LARGEST", 3 << 20)
    big = "x" * (5 << 20)
    events = [kernel("before", 1, 2), kernel(big, 3, 1), kernel("after", 5, 2)]
    profile = broken(tmp_path, text_of(events), 2, "no end found", "byte")
    assert set(profile.events.names) == {"before", "after"}
    quotes = [kernel("before", 1, 2), kernel('\\"}, {' * 900_000, 3, 1), kernel("after", 5, 2)]
    assert set(broken(tmp_path, text_of(quotes), 2, "byte").events.names) == {"before", "after"}
    broken(tmp_path, text_of([kernel("k", 1, 2)], before=f'"x": "{big}", ' + distributed(3)), 1, "too large")
    broken(tmp_path, text_of([kernel("k", 1, 2)], after=f', "x": "{big}"'), 1, "too large")
    long = broken(tmp_path, text_of([kernel("y" * (2 << 20), 1, 2)]), 1)
    assert len(long.events.names[0]) < 1 << 15


@pytest.mark.drawn(group="broken traces")
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """60 MB of spaces, and of brackets, squeezed into files of a few hundred kilobytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for filler in (b" ", b"["):
        packer = zlib.compressobj(9, wbits=31)
        path = tmp_path / "bomb.json.gz"
        parts = [
            packer.compress(b'{"traceEvents": ['),
            *(packer.compress(filler * (1 << 20)) for _ in range(100)),
            packer.flush(),
        ]
        path.write_bytes(b"".join(parts))
        with pytest.raises(NoProfile):
            read_profile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120 << 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"\x7fELF\x02\x01", "is not a profile"),
        (b"PK\x03\x04", "is not a profile"),
        (b"hello", "is not a profile"),
        (b"{", "no list of traceEvents"),
        (b'{"traceEvents": null}', "no list of traceEvents"),
        (b'{"traceEvents": {"a": 1}}', "no list of traceEvents"),
        (b'{"traceEvents": []}', "holds no events"),
        (b"[]", "holds no events"),
        (b"[1, 2]", "could not be read"),
        (
            b'[{"ph": "X", "name": "forward", "cat": "matmul", "ts": 1, "dur": 1}]',
            "none that PyTorch's profiler writes",
        ),
        (b"\x1f\x8b\x08", "gzip stream"),
        (b"\x1f\x8b not gzip at all", "gzip stream"),
    ],
)
def test_no_profile(tmp_path: Path, content: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.json"
    path.write_bytes(content)
    assert main(["trace", str(path), "--no-cache"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert str(path) in said
    assert "Traceback" not in said


SEED_TEXT = text_of([*EVENTS[:4], step(1, 0, 3500), span("cpu_op", "aten::mm", 10, 20, **{"Input Dims": [[2, 3]]}),
                     '{"ph": "i", "name": "[memory]", "ts": 1.5, "args": {"Bytes": 5}}',
                     kernel("nccl", 9, 9, **{"Collective name": "allreduce", "In msg nelems": 5})],
                    before=distributed(2), after=', "baseTimeNanoseconds": 17')  # fmt: skip
BITS = st.sampled_from(
    [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"\\",
        b"null",
        b"-1",
        b"1e999",
        b'"ph"',
        b"\xff",
        b"\x00",
        b"NaN",
        b"}, {",
    ]
)
CHANGES = st.lists(st.tuples(st.integers(0, len(SEED_TEXT)), st.integers(0, 30), BITS), min_size=1, max_size=8)


def test_damaged_gzip_whose_name_xla_uses_too(tmp_path: Path) -> None:
    """Bytes after which zlib itself gives up, in the first that are looked at."""
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(text_of(EVENTS)) + packer.flush(zlib.Z_FULL_FLUSH)
    path = tmp_path / "rank0.pt.trace.json.gz"
    path.write_bytes(packed + b"\xff" * 64)
    opened = open_profiles([tmp_path])
    assert len(opened.profiles[0].events) == len(EVENTS)
    assert any(str(path) in problem for problem in opened.problems)


@settings(max_examples=250, deadline=None)
@given(changes=CHANGES)
def test_mutated_text(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, bytes]]) -> None:
    text = bytearray(SEED_TEXT)
    for at, length, bit in changes:
        text[at : at + length] = bit
    attempt(tmp_path_factory.getbasetemp() / "mutated.json", bytes(text))


@settings(max_examples=100, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=5),
    events=device_events(),
)
def test_mutated_gzip(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], events: list[str]
) -> None:
    packed = bytearray(gzip.compress(text_of(events), 6))
    for at, byte in changes:
        packed[at % len(packed)] = byte
    attempt(tmp_path_factory.getbasetemp() / "mutated.json", bytes(packed))


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("cat", "pid", "tid", "ts", "dur", "args")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(JUNK, st.fixed_dictionaries({"ph": st.sampled_from("XXXXiMs"), "name": st.just("[memory]") | JUNK},
                                                      optional=dict.fromkeys(FIELDS[1:], JUNK))), max_size=6), JUNK)  # fmt: skip
def test_fields_of_any_type(tmp_path_factory: pytest.TempPathFactory, events: list, info: object) -> None:
    text = json.dumps(
        {"distributedInfo": info, "deviceProperties": [info], "traceEvents": events, "baseTimeNanoseconds": info}
    )
    attempt(tmp_path_factory.getbasetemp() / "any.json", text.encode())
