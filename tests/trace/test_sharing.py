"""A large file is read by two processes, half each, and what comes out is the same as from one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from profile_files import distributed, kernel, span, text_of, write
from test_cache import equal

from shardwise.trace.reading import read as read_module
from shardwise.trace.reading.read import read_profile, read_rest

NESTED = {"deep": [{"a": [{}, {"ph": 1}]}, {"b": "}, {"}] * 40}


def events(count: int, **arguments: object) -> list[str]:
    found = []
    for n in range(count):
        found.append(kernel(f"kernel {n % 70} of {n % 3}", n // 2, n % 9, 7 + n % 3, correlation=n, **arguments))
        found.append(
            span("cpu_op", f"aten::{n % 11}", n // 2, 5, tid=n % 4, **{"Input Dims": [[n % 5]], "Sequence number": n})
        )
    found[-9] = kernel("nccl", 17, 3, **{"Collective name": "allreduce", "Process Group Name": "late"})
    found[9] = kernel("nccl", 18, 3, **{"Collective name": "allgather", "Process Group Name": "early"})
    found += ['{"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "last"}}',
              '{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Bytes": 5}}']  # fmt: skip
    return found


@cache
def texts() -> dict[str, bytes]:
    """Profiles to be read, made when a test first asks: megabytes, which not every worker needs."""
    whole = text_of(events(12_000), after=", " + distributed(4).removesuffix(", "))
    broken = whole.replace(b'"correlation": 7000,', b'"correlation" 7000,').replace(b'"dur": 0.003', b'"dur": -0.003')
    return {
        "regular": whole,
        "cut off": whole[: len(whole) * 3 // 4],
        "broken late": broken,
        "broken early": whole.replace(b'"correlation": 1000,', b'"correlation" 1000,'),
        "cuts that are none": text_of(events(1500, **NESTED)),
    }


@pytest.mark.parametrize("case", ["regular", "cut off", "broken late", "broken early", "cuts that are none"])
@pytest.mark.drawn(1)
def test_two_processes_read_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    path = write(tmp_path / "rank.json.gz", texts()[case])
    assert len(texts()[case]) > 2 << 20
    alone = read_profile(path)
    monkeypatch.setattr(read_module, "_SPLIT_FROM", 1 << 20)
    monkeypatch.setattr(read_module, "_cores", lambda: 2)
    together = read_module.open_profiles([path]).profiles[0]
    assert equal(alone, together)
    assert len(alone.events) > 1000


def test_the_second_half_is_half(tmp_path: Path) -> None:
    path = write(tmp_path / "rank.json", texts()["regular"])
    rest = read_rest(path, len(texts()["regular"]) // 2)
    assert rest is not None
    assert len(texts()["regular"]) // 2 <= rest.begin < len(texts()["regular"]) // 2 + (2 << 20)
    assert texts()["regular"][rest.begin :].startswith(b'{"ph"')
    assert read_rest(path, len(texts()["regular"])) is None
