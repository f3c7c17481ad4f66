"""Finds files that get their final name before their bytes are on the disk: after a power failure they would be empty."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def flushes_watched() -> Iterator[Callable[[Path], list[str]]]:
    """A function that returns the files renamed before they were flushed, and the files of a folder that never were."""
    flushed: set[tuple[int, int]] = set()
    early: list[str] = []

    def flush(handle: int) -> None:
        state = os.fstat(handle)
        flushed.add((state.st_ino, state.st_size))

    def unflushed(path: Path) -> Iterator[str]:
        for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
            state = file.stat()
            if state.st_size and (state.st_ino, state.st_size) not in flushed:
                yield file.name

    def watched(rename: Callable[..., None]) -> Callable[..., None]:
        def renamed(before: Any, after: Any, **named: Any) -> None:
            early.extend(unflushed(Path(before)))
            rename(before, after, **named)

        return renamed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", flush)
        for name in ("rename", "replace"):
            patch.setattr(os, name, watched(getattr(os, name)))
        yield lambda folder: sorted({*early, *unflushed(folder)})
