"""Keeps what was read of a profile as Parquet tables, so that the next question about it is answered at once. Any tool that reads
Parquet can open them.

Each profile has a folder named after its path. The folder is written elsewhere and renamed into place, so nobody reads half of
one. Each table carries the size, time and format of the file it was read from; one that does not fit, or cannot be read, is
ignored.
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
from shardwise.trace.reading.profile import Allocations, Device, Events, Group, Lane, Messages, Profile, Shapes

FORMAT = 1
"""Raise it whenever what is read of a file, or how it is stored, changes."""

TABLES: Mapping[str, Any] = {"events": Events, "messages": Messages, "shapes": Shapes, "allocations": Allocations}
_STAMP, _REST = b"shardwise.stamp", b"shardwise.rest"
_PLAIN = ("rank", "world", "base", "groups", "devices", "backend", "rank_known", "problems")


class _Rest(msgspec.Struct):
    """The parts of a profile that are not columns."""

    rank: int
    world: int
    base: int
    path: str
    groups: dict[str, Group]
    devices: tuple[Device, ...]
    backend: str
    rank_known: bool
    problems: tuple[str, ...]
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    message_texts: tuple[str, ...]
    shape_texts: tuple[str, ...]


def default_folder() -> Path:
    """The user's cache folder."""
    return cache_folder("traces")


def _entry(folder: Path, path: Path) -> Path:
    return folder / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]


def stamp(path: Path) -> bytes:
    """Changes when the file or the format of the cache does."""
    about = path.stat()
    return f"{FORMAT} {about.st_size} {about.st_mtime_ns}".encode()


def store(folder: Path, profile: Profile, stamped: bytes) -> None:
    """Store a profile that was read when its file had this stamp. A full disk or a folder without write access is no error."""
    entry = _entry(folder, Path(profile.path))
    new = entry.with_name(f"{entry.name}.{os.getpid()}.new")
    old = entry.with_name(f"{entry.name}.{os.getpid()}.old")
    rest = _Rest(
        **{name: getattr(profile, name) for name in _PLAIN},
        path=profile.path,
        names=profile.events.names,
        lanes=profile.events.lanes,
        message_texts=profile.messages.texts,
        shape_texts=profile.shapes.texts,
    )
    with contextlib.suppress(OSError, pa.ArrowException):
        new.mkdir(parents=True)
        for name in TABLES:
            metadata = {_STAMP: stamped, **({_REST: msgspec.json.encode(rest)} if name == "events" else {})}
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
    """The stored profile of a file as it is now, or None."""
    entry = _entry(folder, path)
    try:
        now = stamp(path)
        tables = {name: _table(entry / f"{name}.parquet", now) for name in TABLES}
        rest = msgspec.json.decode(tables["events"].schema.metadata[_REST], type=_Rest)
        columns = {name: _arrays(table) for name, table in tables.items()}
        texts: dict[str, dict[str, Any]] = {
            "events": {"names": rest.names, "lanes": rest.lanes},
            "messages": {"texts": rest.message_texts},
            "shapes": {"texts": rest.shape_texts},
            "allocations": {},
        }
        parts = {name: kind(**columns[name], **texts[name]) for name, kind in TABLES.items()}
        return Profile(path=str(path), **{name: getattr(rest, name) for name in _PLAIN}, **parts)
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException, msgspec.MsgspecError):
        return None


def _columns(part: Any) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for f in fields(part) if isinstance(getattr(part, f.name), np.ndarray)}


def _table(file: Path, stamped: bytes) -> pa.Table:
    table = pq.read_table(file, memory_map=True, use_threads=False)
    if (table.schema.metadata or {}).get(_STAMP) != stamped:
        raise ValueError("read from another file")
    return table


def _arrays(table: pa.Table) -> dict[str, Any]:
    return {name: table.column(name).to_numpy() for name in table.column_names}
