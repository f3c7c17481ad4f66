"""Atomic file writes, and the user's cache folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or none, even after a power failure."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def sync(path: Path) -> None:
    """Flush to disk what others wrote: a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder(kind: str) -> Path:
    """The user's cache folder for one kind of file; everything in it can be recreated."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(home) if home.startswith("/") else Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in some containers
        folder = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return folder / "shardwise" / kind
