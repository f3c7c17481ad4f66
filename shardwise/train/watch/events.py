"""What happened to a run over the whole life of its folder: `events.jsonl`, one JSON object a line, only ever appended to.

Written by the first rank and by the process that starts the ranks. `metrics.jsonl` is cut back when a run resumes; this file is
not, so that time lost to failures can be told at the end. A line is one write to a file opened for appending, so lines of two
writers do not mix. An event that cannot be written, on a full disk say, is dropped: the account of a run must not end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

FILE = "events.jsonl"


def record(folder: Path, what: str, **values: Any) -> None:
    """Append one event with the time of now."""
    line = json.dumps({"time": round(time.time(), 3), "what": what, **values}) + "\n"
    with contextlib.suppress(OSError):
        file = os.open(folder / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            length = os.fstat(file).st_size
            torn = length > 0 and os.pread(file, 1, length - 1) != b"\n"  # the last writer did not get to the end
            os.write(file, b"\n" * torn + line.encode())
        finally:
            os.close(file)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events so far; lines that a crash or a full disk cut off are passed over."""
    path = folder / FILE
    events = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "what" in event:
                events.append(event)
    return events
