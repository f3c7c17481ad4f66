"""Files of records, one JSON object a line, only ever appended to: a run's metrics and events.

A line is one write to a file opened for appending, so lines of two writers do not mix. What a crash cut off or a disk damaged costs
the records that it hit and no others. Accounts of a run must not end it: what cannot be written, on a full disk say, is left out.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(path: Path, record: dict[str, Any]) -> OSError | None:
    """Add a record; gives why it could not be written."""
    line = json.dumps(record) + "\n"
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            length = os.fstat(file).st_size
            torn = length > 0 and os.pread(file, 1, length - 1) != b"\n"  # the last writer did not get to the end
            os.write(file, b"\n" * torn + line.encode())
        finally:
            os.close(file)
    except OSError as e:
        return e
    return None


def parse(line: bytes) -> dict[str, Any]:
    """The record of a line; empty for what is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file; the last is what stands behind the last end of a line."""
    return path.read_bytes().split(b"\n") if path.exists() else []
