"""What readers of other profilers' files tell (`nsys.py`, `xla.py`), before `foreign.py` writes it as PyTorch's profiler would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.run.problems import Problem, UserError

SQLITE = b"SQLite format 3\0"
"""How its databases begin."""


class Span(NamedTuple):
    """Something that ran, as Kineto has it; times in nanoseconds."""

    category: str
    name: str
    start: int
    end: int
    process: int
    thread: int
    arguments: dict[str, Any]


class ForeignRank(NamedTuple):
    """A rank of a foreign profile."""

    spans: Iterator[Span]
    devices: list[dict[str, Any]]
    rank: int | None
    """None: not known, and taken from the file's name."""


class NoReport(UserError):
    """The file belongs to another program."""


def refused(path: Path, why: str) -> UserError:
    """A foreign profile that cannot be read."""
    return UserError(Problem(why, where=str(path)))
