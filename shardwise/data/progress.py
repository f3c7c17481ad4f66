"""How a build is going: a bar on a terminal, an occasional line in a log. Bytes of input are what is known
from the start, so they measure the way; tokens a second tell the speed."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol, TextIO

_SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """What a build tells while it runs."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, total: int, done: int) -> None:
        """Bytes there are, and bytes an earlier, interrupted build had done."""

    def update(self, done: int, tokens: int) -> None:
        """Bytes done by now, and tokens made since the start."""


class Silent:
    """Says nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self, total: int, done: int) -> None:
        return None

    def update(self, done: int, tokens: int) -> None:
        return None


class Lines:
    """A line every few seconds, for logs."""

    def __init__(self, stream: TextIO, every: float = _SECONDS_BETWEEN_LINES) -> None:
        self._stream = stream
        self._every = every
        self._total = self._before = 0
        self._begun = self._last = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self, total: int, done: int) -> None:
        self._total, self._before = total, done
        self._begun = self._last = time.monotonic()

    def update(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        elapsed = now - self._begun
        speed = (done - self._before) / elapsed
        left = f", {clock((self._total - done) / speed)} left" if speed > 0 else ""
        share = done / self._total if self._total else 1.0
        way = f"{share:5.1%}  {megabytes(done)} of {megabytes(self._total)}"
        print(f"{way}, {tokens / elapsed:,.0f} tokens/s{left}", file=self._stream, flush=True)


class Bar:
    """A bar on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("tokenising"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        self._rich = RichProgress(*columns, console=Console(file=stream), transient=True)
        self._task: Any = None
        self._begun = time.monotonic()

    def __enter__(self) -> Bar:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def start(self, total: int, done: int) -> None:
        self._begun = time.monotonic()
        self._task = self._rich.add_task("", total=total, completed=done, speed="")

    def update(self, done: int, tokens: int) -> None:
        speed = f"{tokens / max(time.monotonic() - self._begun, 1e-3):,.0f} tokens/s"
        self._rich.update(self._task, completed=done, speed=speed)


def progress_for(stream: TextIO | None = None) -> Progress:
    """A bar where a person watches, lines elsewhere."""
    chosen = stream or sys.stderr
    return Bar(chosen) if chosen.isatty() else Lines(chosen)


def megabytes(count: float) -> str:
    """A number of bytes for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def clock(seconds: float) -> str:
    """A time for people: 0:07, 12:30 or 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
