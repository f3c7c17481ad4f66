"""Caches parsed profiles as Parquet tables, which any Parquet reader can open.

Each profile has a folder named by a hash of its path. The folder is written under another name and renamed into place, so nobody
reads half of one. Each table carries the size and modification time of its source file and the version of the cache format. A
table with another stamp, or one that cannot be read, is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardwise.files import cache_folder
from shardwise.trace.reading.profile import Allocations, CommParams, Device, Events, Group, Profile, Shapes, Track

FORMAT = 3
"""Version of the cache. Raise it whenever the parsed columns or their storage change."""

TABLES: Mapping[str, Any] = {"events": Events, "comm_params": CommParams, "shapes": Shapes, "allocations": Allocations}
_STAMP, _METADATA = b"shardwise.stamp", b"shardwise.metadata"
_FIELDS = ("rank", "world", "base", "groups", "devices", "rank_known", "problems")


class _Metadata(msgspec.Struct):
    """The fields of a profile that are not columns."""

    rank: int
    world: int
    base: int
    path: str
    groups: dict[str, Group]
    devices: tuple[Device, ...]
    rank_known: bool
    problems: tuple[str, ...]
    names: tuple[str, ...]
    tracks: tuple[Track, ...]
    comm_texts: tuple[str, ...]
    shape_texts: tuple[str, ...]


def default_folder() -> Path:
    """The user's cache folder."""
    return cache_folder("traces")


def _entry(folder: Path, path: Path) -> Path:
    return folder / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]


def stamp(path: Path) -> bytes:
    """Identifies a version of the file and of the cache format."""
    info = path.stat()
    return f"{FORMAT} {info.st_size} {info.st_mtime_ns}".encode()


def store(folder: Path, profile: Profile, stamped: bytes) -> None:
    """Store a profile whose file had this stamp when it was read. A full disk, a read-only folder, or a
    path or text that is not UTF-8 is no error."""
    entry = _entry(folder, Path(profile.path))
    new = entry.with_name(f"{entry.name}.{os.getpid()}.new")
    old = entry.with_name(f"{entry.name}.{os.getpid()}.old")
    extra = _Metadata(
        **{name: getattr(profile, name) for name in _FIELDS},
        path=profile.path,
        names=profile.events.names,
        tracks=profile.events.tracks,
        comm_texts=profile.comm_params.texts,
        shape_texts=profile.shapes.texts,
    )
    with contextlib.suppress(OSError, ValueError, pa.ArrowException):
        new.mkdir(parents=True)
        for name in TABLES:
            metadata = {_STAMP: stamped, **({_METADATA: msgspec.json.encode(extra)} if name == "events" else {})}
            table = pa.table(_columns(getattr(profile, name))).replace_schema_metadata(metadata)
            pq.write_table(
                table, new / f"{name}.parquet", compression="lz4", use_dictionary=False, write_statistics=False
            )
        with contextlib.suppress(FileNotFoundError):
            entry.rename(old)
        new.rename(entry)
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, path: Path) -> Profile | None:
    """The cached profile of a file, None if there is none for its current version."""
    entry = _entry(folder, path)
    try:
        now = stamp(path)
        tables = {name: _table(entry / f"{name}.parquet", now) for name in TABLES}
        extra = msgspec.json.decode(tables["events"].schema.metadata[_METADATA], type=_Metadata)
        columns = {name: _arrays(table) for name, table in tables.items()}
        texts: dict[str, dict[str, Any]] = {
            "events": {"names": extra.names, "tracks": extra.tracks},
            "comm_params": {"texts": extra.comm_texts},
            "shapes": {"texts": extra.shape_texts},
            "allocations": {},
        }
        parts = {name: kind(**columns[name], **texts[name]) for name, kind in TABLES.items()}
        return Profile(path=str(path), **{name: getattr(extra, name) for name in _FIELDS}, **parts)
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException, msgspec.MsgspecError):
        return None


# Arrays go to Arrow and back as buffers: its own conversions import pandas where that is installed, for a second or more.


def _columns(part: Any) -> dict[str, pa.Array]:
    arrays = {f.name: getattr(part, f.name) for f in fields(part) if isinstance(getattr(part, f.name), np.ndarray)}
    return {
        name: pa.Array.from_buffers(pa.from_numpy_dtype(x.dtype), len(x), [None, pa.py_buffer(np.ascontiguousarray(x))])
        for name, x in arrays.items()
    }


def _table(file: Path, stamped: bytes) -> pa.Table:
    with pq.ParquetFile(file, memory_map=True) as opened:
        table = opened.read(use_threads=False)
    if (table.schema.metadata or {}).get(_STAMP) != stamped:
        raise ValueError("stale")
    return table


def _arrays(table: pa.Table) -> dict[str, Any]:
    return {name: np.from_dlpack(table.column(name).combine_chunks()) for name in table.column_names}
