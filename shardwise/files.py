"""Files that are there whole or not at all, and where those go that may be thrown away."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file in place so that it is seen whole or not at all, even when the power fails."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(draft, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def sync(path: Path) -> None:
    """Bring to the disk what others wrote: a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder(kind: str) -> Path:
    """Where things of a kind are kept that can be made again: in the user's folder for such."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(home) if home.startswith("/") else Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in some containers
        folder = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return folder / "shardwise" / kind
