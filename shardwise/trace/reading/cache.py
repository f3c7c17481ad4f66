"""Keeps what was read of a profile as Parquet tables, so that the next question about it is answered at once. Any tool that reads
Parquet can open them too.

A profile has a folder by its path. It is written beside and then moved into place, so nobody sees half of one; each of its tables
says which file it was read from, by size, time and format, and one that does not fit or cannot be read is as good as none.
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
from shardwise.trace.reading.events import Allocations, Device, Events, Group, Lane, Messages, Profile, Shapes

FORMAT = 1
"""Raise it whenever what is read of a file, or how it is kept, changes."""

TABLES: Mapping[str, Any] = {"events": Events, "messages": Messages, "shapes": Shapes, "allocations": Allocations}
_STAMP, _REST = b"shardwise.stamp", b"shardwise.rest"


class _Rest(msgspec.Struct):
    """What of a profile is no column."""

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
    """Where caches go: the user's folder for such things."""
    return cache_folder("traces")


def _place(folder: Path, path: Path) -> Path:
    whole = os.fsencode(path.resolve())
    return folder / f"{hashlib.sha256(whole).hexdigest()[:24]}"


def stamp(path: Path) -> bytes:
    """What tells a file from what it was at another time."""
    about = path.stat()
    return f"{FORMAT} {about.st_size} {about.st_mtime_ns}".encode()


def store(folder: Path, profile: Profile, stamped: bytes) -> None:
    """Keep a profile that was read when its file had this stamp. A full disk or a folder that cannot be written is no error."""
    place = _place(folder, Path(profile.path))
    beside = place.with_name(f"{place.name}.{os.getpid()}.new")
    old = place.with_name(f"{place.name}.{os.getpid()}.old")
    rest = _Rest(
        **{name: getattr(profile, name) for name in ("rank", "world", "base", "path", "groups", "devices", "backend")},
        rank_known=profile.rank_known,
        problems=profile.problems,
        names=profile.events.names,
        lanes=profile.events.lanes,
        message_texts=profile.messages.texts,
        shape_texts=profile.shapes.texts,
    )
    with contextlib.suppress(OSError, pa.ArrowException):
        beside.mkdir(parents=True)
        for name in TABLES:
            metadata = {_STAMP: stamped, **({_REST: msgspec.json.encode(rest)} if name == "events" else {})}
            table = pa.table(_columns(getattr(profile, name))).replace_schema_metadata(metadata)
            pq.write_table(
                table, beside / f"{name}.parquet", compression="lz4", use_dictionary=False, write_statistics=False
            )
        with contextlib.suppress(FileNotFoundError):
            place.rename(old)
        beside.rename(place)
    shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, path: Path) -> Profile | None:
    """The kept profile of a file as it is now, or None."""
    place = _place(folder, path)
    try:
        now = stamp(path)
        tables = {name: _table(place / f"{name}.parquet", now) for name in TABLES}
        rest = msgspec.json.decode(tables["events"].schema.metadata[_REST], type=_Rest)
        columns = {name: _arrays(table) for name, table in tables.items()}
        texts: dict[str, dict[str, Any]] = {
            "events": {"names": rest.names, "lanes": rest.lanes},
            "messages": {"texts": rest.message_texts},
            "shapes": {"texts": rest.shape_texts},
            "allocations": {},
        }
        parts = {name: kind(**columns[name], **texts[name]) for name, kind in TABLES.items()}
        return Profile(
            rank=rest.rank,
            world=rest.world,
            base=rest.base,
            path=str(path),
            groups=rest.groups,
            devices=rest.devices,
            backend=rest.backend,
            rank_known=rest.rank_known,
            problems=rest.problems,
            **parts,
        )
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
