"""What is kept of a profile equals what was read, follows the file, and is never trusted when broken."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from patience import HANG_SECONDS
from profile_files import distributed, kernel, span, text_of, write

from shardwise.trace.reading import cache
from shardwise.trace.reading.profile import Profile
from shardwise.trace.reading.read import open_profiles, read_profile

MEMORY = '{"ph": "i", "name": "[memory]", "ts": 9.5, "args": {"Bytes": -512, "Addr": 99}}'
EVENTS = [kernel("ncclKernel ü", 8, 1, **{"Collective name": "allreduce", "Process Group Name": "0"}), MEMORY,
          span("cpu_op", "aten::add", 6, -1, **{"Input Dims": [[2, 3], []], "Sequence number": 3})]  # fmt: skip
TEXT = text_of(
    EVENTS,
    before=distributed(5) + '"deviceProperties": [{"id": 0, "name": "H200", "totalGlobalMem": 1, "numSms": 2}], ',
)


def equal(one: Profile, other: Profile) -> bool:
    """Column by column, and in all else."""
    for name in cache.TABLES:
        for f in fields(getattr(one, name)):
            a, b = (getattr(getattr(profile, name), f.name) for profile in (one, other))
            if isinstance(a, np.ndarray) and (a.dtype != b.dtype or not np.array_equal(a, b)):
                return False
            if not isinstance(a, np.ndarray) and a != b:
                return False
    same = {name: getattr(one, name) for name in cache.TABLES}
    return replace(other, **same) == one


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Path]:
    """A profile, and the folder of a cache that holds it."""
    path = write(tmp_path / "rank.json.gz", TEXT)
    open_profiles([path], tmp_path / "cache")
    return path, tmp_path / "cache"


def test_round_trip(kept: tuple[Path, Path]) -> None:
    path, folder = kept
    profile = read_profile(path)
    assert profile.problems
    assert len(profile.comm_params) == len(profile.shapes) == len(profile.allocations) == 1
    found = cache.load(folder, path)
    assert found is not None
    assert equal(profile, found)
    assert equal(profile, open_profiles([path], folder).profiles[0])
    assert [entry.name for entry in folder.iterdir() if "." in entry.name] == [], "nothing half-written is left"


def test_pandas_is_not_imported(tmp_path: Path) -> None:
    """Where it is installed, that takes longer than reading a million events."""
    path = write(tmp_path / "rank.json.gz", TEXT)
    program = (
        "import sys\nfrom pathlib import Path\nfrom shardwise.trace.reading import cache, read\n"
        "path, folder = map(Path, sys.argv[1:])\nread.open_profiles([path], folder)\n"
        "assert cache.load(folder, path)\nassert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, path, tmp_path / "cache"], check=True, timeout=HANG_SECONDS)


def test_a_changed_file_is_read_again(kept: tuple[Path, Path]) -> None:
    path, folder = kept
    write(path, text_of([*EVENTS, kernel("new", 1, 2)]))
    assert cache.load(folder, path) is None
    assert "new" in open_profiles([path], folder).profiles[0].events.names
    assert len(list(folder.iterdir())) == 1, "the old one is gone"
    assert cache.load(folder, path) is not None


@pytest.mark.parametrize("damage", ["cut", "garbage", "missing", "another", "empty"])
@pytest.mark.parametrize("table", ["events", "shapes"])
def test_a_broken_cache_is_written_anew(kept: tuple[Path, Path], damage: str, table: str) -> None:
    path, folder = kept
    file = next(folder.rglob(f"{table}.parquet"))
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        other = next(folder.rglob("comm_params.parquet")).read_bytes()
        file.write_bytes({"cut": whole[:-20], "garbage": bytes(len(whole)), "another": other, "empty": b""}[damage])
    assert cache.load(folder, path) is None
    assert equal(open_profiles([path], folder).profiles[0], read_profile(path))
    assert cache.load(folder, path) is not None


def test_no_place_for_a_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "rank.json", TEXT)
    occupied = write(tmp_path / "occupied", b"a file")
    assert len(open_profiles([path], occupied).profiles[0].events) == 2


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.json")), TEXT)
    assert len(open_profiles([path], tmp_path / "cache").profiles[0].events) == 2
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half-written is left"


def test_translated_profiles_are_not_kept(kept: tuple[Path, Path]) -> None:
    """They are written to a new folder each time, so the cache would grow and never be used."""
    path, folder = kept
    there = list(folder.iterdir())
    for name in ("one.sqlite", "two.sqlite"):
        with sqlite3.connect(path.parent / name) as base:
            base.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
            base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 9)")
        base.close()
        assert len(open_profiles([path, path.parent / name], folder).profiles) == 2
    assert len(open_profiles([path.parent], folder).profiles) == 3
    assert list(folder.iterdir()) == there


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "shardwise/traces"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_folder() == tmp_path / "home/.cache/shardwise/traces"
