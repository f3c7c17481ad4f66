"""Follows a run folder as it grows: `metrics.jsonl` and `events.jsonl` are read on from the last position.

If nothing is new, a look costs two `stat` calls. A resumed run truncates its metrics and writes other lines in their place. So the
last bytes that were read are remembered, and if they are no longer there, the file is read from its beginning.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from shardwise.run.second_models.named_model import RUN_FILE
from shardwise.train.faults.goodput import EVENTS_FILE, goodput
from shardwise.train.progress.metrics import FILE, parse_record
from shardwise.workbench.columns import Series

CHUNK = 4 * 2**20
"""Bytes read at a time, so that a page sees the beginning of a long file while the rest is read."""
MOST_EVENTS = 2000
MOST_SAMPLES, MOST_TEXTS = 50, 8
"""The number of last evaluations whose text samples are kept, and of texts kept from each."""
REMEMBERED = 64
"""Bytes before the read position, by which a file is recognized as the same."""


class Tail:
    """The complete lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] = (-1, -1)
        self._at, self._before = 0, b""
        self.more = False
        """Whether the file may continue where the last read stopped."""

    def read(self) -> tuple[list[bytes], bool]:
        """New lines, at most some MiB of them, and whether the file has been replaced, so that they are its first."""
        try:
            now = os.stat(self.path)
        except OSError:
            return [], False
        if (now.st_size, now.st_mtime_ns) == self._seen and not self.more:
            return [], False
        try:
            with open(self.path, "rb") as file:
                known = len(self._before)
                file.seek(self._at - known)
                again = now.st_size < self._at or file.read(known) != self._before
                if again:
                    self._at, self._before = 0, b""
                file.seek(self._at)
                content = file.read(CHUNK)
                content += file.readline()  # a line may be longer than all that is read at a time
        except OSError:
            return [], False
        self._seen = (now.st_size, now.st_mtime_ns)
        whole = content.rfind(b"\n") + 1
        self.more = whole >= CHUNK
        self._at += whole
        self._before = (self._before + content[:whole])[-REMEMBERED:]
        return content[:whole].split(b"\n")[:-1], again


class FollowedRun:
    """The data of a run from its folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.version = 0
        self._metrics, self._events = Tail(folder / FILE), Tail(folder / EVENTS_FILE)
        self._forget()
        self.events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)

    def _forget(self) -> None:
        self.series: dict[str, Series] = {}
        self.ranks: deque[tuple[float, list[float]]] = deque(maxlen=512)
        self.samples: deque[dict[str, Any]] = deque(maxlen=MOST_SAMPLES)
        self.useful = self.skipped = 0.0

    def look(self) -> bool:
        """Read on; returns whether there was anything new."""
        lines, again = self._metrics.read()
        if again:
            self._forget()
        if lines:
            self._add(_records(lines))
        told, new = self._events.read()
        if new:
            self.events.clear()
        self.events.extend(event for line in told if _is_sound(event := parse_record(line)))
        if lines or again or told or new:
            self.version += 1
            return True
        return False

    @property
    def more(self) -> bool:
        """Whether more can be read at once."""
        return self._metrics.more

    def _add(self, records: list[dict[str, Any]]) -> None:
        added: dict[str, tuple[list[float], list[float]]] = {}
        for record in records:
            step = record.get("step")
            if type(step) is not int or _number(step) is None:
                continue
            for key, value in record.items():
                if key == "step":
                    continue
                if isinstance(value, list):
                    if key == "compute_seconds" and all(map(_is_finite, value)):
                        self.ranks.append((step, value))
                    if key == "samples" and (texts := _texts(value)):
                        self.samples.append({"step": step, "texts": texts})
                    continue
                number = _number(value)
                if number is not None:
                    steps, values = added.setdefault(key, ([], []))
                    steps.append(step)
                    values.append(number)
            taken = _number(record.get("seconds")) or 0.0
            if record.get("skipped"):
                self.skipped += taken
            else:
                self.useful += taken
        for key, (steps, values) in added.items():
            self.series.setdefault(key, Series()).extend(steps, values)

    def summary(self, now: float) -> dict[str, Any]:
        """The state of the run: its last step, whether it is still training, and its goodput."""
        latest = {key: series.last for key, series in self.series.items()}
        step = max((point[0] for point in latest.values() if point), default=0)
        return {
            "name": self.name,
            "version": self.version,
            "step": step,
            "points": sum(map(len, self.series.values())),
            "metrics": list(self.series),
            "latest": {key: _shown(point[1]) for key, point in latest.items() if point},
            "state": self._state(),
            "goodput": self._goodput(now),
            "reading": self.more,
        }

    def _state(self) -> str:
        """The state that the last event reports."""
        for event in reversed(self.events):
            word = {"end": "ended", "failed": "failed", "begin": "starting", "training": "training"}.get(event["what"])
            if word:
                return word
        return "training" if self.series else "starting"

    def _goodput(self, now: float) -> dict[str, Any] | None:
        if (
            not self.events or len(self.events) == MOST_EVENTS
        ):  # older events were dropped, and the goodput of the rest would be wrong
            return None
        steps = [{"seconds": self.useful}, {"seconds": self.skipped, "skipped": True}]
        try:
            found = goodput(list(self.events), steps, now if self._state() == "training" else self._last_time())
        except (KeyError, TypeError, StopIteration, OverflowError):  # events that another version wrote
            return None
        return {"share": found.share, "total": found.total, "lost": found.lost, "failures": found.failures}

    def _last_time(self) -> float:
        times = [event["time"] for event in self.events if isinstance(event.get("time"), int | float)]
        return max(times, default=0.0)


def _records(lines: list[bytes]) -> list[dict[str, Any]]:
    """The records of lines; parsed all at once, which takes a third of the time, unless one is damaged."""
    try:
        found = json.loads(b"[" + b",".join(line for line in lines if line) + b"]")
        return [record for record in found if isinstance(record, dict)]
    except (ValueError, RecursionError):
        return [record for line in lines if (record := parse_record(line))]


def _texts(samples: list[Any]) -> list[dict[str, str]]:
    """The valid text samples."""
    return [
        {"prompt": each["prompt"], "text": each["text"]}
        for each in samples[:MOST_TEXTS]
        if isinstance(each, dict) and isinstance(each.get("prompt"), str) and isinstance(each.get("text"), str)
    ]


def _number(value: Any) -> float | None:
    """A number; values that are not finite were written as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # a damaged line
            return None
    return float(value) if value in ("nan", "inf", "-inf") else None


def _is_finite(value: Any) -> bool:
    number = _number(value)
    return number is not None and math.isfinite(number)


def _is_sound(event: dict[str, Any]) -> bool:
    """Whether a record is an event that a page can be told: JSON has neither NaN nor infinity, though Python reads them."""
    try:
        json.dumps(event, allow_nan=False)
    except ValueError:
        return False
    return isinstance(event.get("what"), str)


def _shown(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def run_folders(folder: Path) -> list[Path]:
    """The folder itself if it holds a run, else the folders in it that do, up to two levels deep."""
    if _is_run(folder):
        return [folder]
    found: list[Path] = []
    for pattern in ("*", "*/*"):  # folders inside a run are its checkpoints
        found += [each for each in sorted(folder.glob(pattern)) if each.parent not in found and _is_run(each)]
    return found


def _is_run(folder: Path) -> bool:
    try:
        return (folder / FILE).is_file() or (folder / EVENTS_FILE).is_file() or (folder / RUN_FILE).is_file()
    except OSError:  # another user's folder
        return False
