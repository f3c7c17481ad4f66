"""What happened to a run over the whole life of its folder: `events.jsonl`.

Written by the first rank and by the process that starts the ranks. `metrics.jsonl` is cut back when a run resumes; this file is
not, so that time lost to failures can be told at the end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shardwise.train import records

FILE = "events.jsonl"


def record(folder: Path, what: str, **values: Any) -> None:
    """Append one event with the time of now."""
    records.append(folder / FILE, {"time": round(time.time(), 3), "what": what, **values})


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events so far."""
    return [event for line in records.lines_of(folder / FILE) if "what" in (event := records.parse(line))]
