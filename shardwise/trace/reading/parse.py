"""One file into one `Profile`: its events as columns, and what it says of its rank, its process groups and its devices.

Whatever is wrong with the file ends in `problems`; only a file of which nothing could be read is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shardwise.run.problems import Problem, UserError
from shardwise.trace.reading.columns import Columns
from shardwise.trace.reading.events import NONE, Device, Group, Profile
from shardwise.trace.reading.mend import mend
from shardwise.trace.reading.problems import Problems
from shardwise.trace.reading.source import Source
from shardwise.trace.reading.text import Text

_RANK_IN_NAME = re.compile(r"rank[-_ .]?(\d{1,7})(?!\d)", re.IGNORECASE)


class NoProfile(UserError):
    """Nothing could be read of the file."""


class NoEvents(NoProfile):
    """The file is JSON with no list of events: something else than a profile."""


class _Around(msgspec.Struct):
    """What is wanted of the members beside the events."""

    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    base: Any = msgspec.field(default=None, name="baseTimeNanoseconds")


class Rest(NamedTuple):
    """The later part of a file."""

    begin: int
    """Byte of the text at which it begins."""
    columns: Columns
    tail: bytes


class SecondHalf(NamedTuple):
    """The part of a file that is being read elsewhere."""

    begin: int
    """It begins at the first cut at or after this byte of the text."""
    wait: Callable[[], Rest | None]


def read_profile(
    path: Path, progress: Callable[[int], None] | None = None, second_half: SecondHalf | None = None
) -> Profile:
    """Read one file. Raises `NoProfile` when it is none; `progress` is told how many bytes of the file are read. The second half
    of it may be read elsewhere at the same time."""
    problems = Problems(str(path))
    columns = Columns(problems)
    try:
        with Source(path, progress) as source:
            text = Text(source, problems)
            refusal = text.begin()
            if refusal:
                kind = NoEvents if text.is_other_json else NoProfile
                raise kind(Problem(f"{refusal}{': ' + source.problem if source.problem else ''}", where=str(path)))
            for position, records in text.records():
                columns.add(position, records)
                if second_half and text.position >= second_half.begin:
                    rest, second_half = second_half.wait(), None
                    if rest and rest.begin == text.position:
                        columns.absorb(rest.columns)
                        text.tail = rest.tail
                        break
    except OSError as e:
        raise NoProfile(Problem(f"cannot be read: {e.strerror or e}", where=str(path))) from None
    around = _around(text.head, "before", problems), _around(text.tail, "after", problems)
    info = next((a.distributed for a in around if isinstance(a.distributed, dict)), {})
    base = next((a.base for a in around if isinstance(a.base, int) and abs(a.base) < 1 << 62), 0)
    devices = next((a.devices for a in around if isinstance(a.devices, list) and a.devices), [])
    rank, known = _rank(info, path)
    events, messages, shapes, allocations = columns.finish()
    if not len(events):
        raise NoProfile(*(problems.sentences() or (f"{path}: holds no events",)))
    if events.of_kind("other").all():  # a timeline, such as a plan's
        raise NoProfile(*problems.sentences(), f"{path}: holds events, but none that PyTorch's profiler writes")
    return Profile(
        rank=rank,
        world=_whole(info.get("world_size")),
        base=base,
        path=str(path),
        events=events,
        messages=messages,
        shapes=shapes,
        allocations=allocations,
        groups=_groups(info.get("pg_config")),
        devices=tuple(_devices(devices)),
        backend=info["backend"] if isinstance(info.get("backend"), str) else "",
        rank_known=known,
        problems=problems.sentences(),
    )


def read_rest(path: Path, begin: int) -> Rest | None:
    """The events of a file from about a byte on; None where it cannot be cut."""
    problems = Problems(str(path))
    columns = Columns(problems)
    with Source(path) as source:
        text = Text(source, problems)
        if text.begin() or not text.skip(begin):
            return None
        begin = text.position
        for position, records in text.records():
            columns.add(position, records)
    return Rest(begin, columns, text.tail)


def _around(text: bytes, where: str, problems: Problems) -> _Around:
    """What stands before or after the events."""
    if not text:
        return _Around()
    for attempt in (text, mend(text)):
        try:
            return msgspec.json.decode(attempt, type=_Around)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
    problems.say(f"what stands {where} its events is not JSON, so rank, groups and devices in it are unknown")
    return _Around()


def _rank(info: dict[str, Any], path: Path) -> tuple[int, bool]:
    """The rank by the file, else by its name, else 0, and whether it is known."""
    rank = _whole(info.get("rank"))
    if rank >= 0:
        return rank, True
    found = _RANK_IN_NAME.findall(path.name)
    return (int(found[-1]), True) if found else (0, False)


def _whole(value: Any) -> int:
    """A number that may be written as text; `NONE` for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else NONE


def _groups(config: Any) -> dict[str, Group]:
    """The process groups by name."""
    groups = {}
    for entry in config if isinstance(config, list) else []:
        if not isinstance(entry, dict):
            continue
        ranks = entry.get("ranks")
        members = tuple(rank for rank in map(_whole, ranks) if rank >= 0) if isinstance(ranks, list) else ()
        size = _whole(entry.get("pg_size"))
        groups[str(entry.get("pg_name", ""))] = Group(
            str(entry.get("pg_desc") or ""), members, size if size >= 0 else len(members)
        )
    return groups


def _devices(listed: list[Any]) -> list[Device]:
    return [
        Device(_whole(d.get("id")), str(d.get("name", "")), _whole(d.get("numSms")), memory)
        for d in listed
        if isinstance(d, dict) and isinstance(memory := d.get("totalGlobalMem", NONE), int)
    ]
