"""Goodput: the share of all time spent on a run folder in which useful steps were computed.

The life of a folder is a sequence of sessions, each from the start of its ranks to their end, read from `events.jsonl`. The first
rank and the agent append to it, and unlike `metrics.jsonl` it is never truncated. Useful steps are those that `metrics.jsonl` has
now. All other time is a named loss: start-up, checkpoint stalls, evaluation, skipped steps, steps repeated after a failure or a
rollback, hangs, waiting between a failure and the next start, and the remainder. Time between two commands is listed separately.

Several commands may be started in one folder at once. One of them gets the folder and trains, the others are refused, and their
events are interleaved with those of the first. So an event names its command, which separates the sessions, and time in which
several were up counts once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.report.words import clock
from shardwise.train.faults.ranks import command_name
from shardwise.train.progress.metrics import append_record, parse_record, read_lines

EVENTS_FILE = "events.jsonl"
LOSSES = ("start-up", "checkpoints", "evaluation", "skipped", "repeated", "hangs", "restarts", "other")
MEASURED = {"saved": "checkpoints", "evaluated": "evaluation", "repeat": "repeated", "hang": "hangs"}
"""Events that carry the seconds of a loss."""
BY_RANKS = ("training", "saved", "evaluated", "repeat", "bad")
"""Events that ranks record while the run is up."""


def record_event(folder: Path, what: str, **values: Any) -> None:
    """Append one event with the current time and its command."""
    event = {"time": round(time.time(), 3), "what": what, "command": command_name(), **values}
    append_record(folder / EVENTS_FILE, event)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events so far."""
    return [event for line in read_lines(folder / EVENTS_FILE) if "what" in (event := parse_record(line))]


@dataclass(frozen=True)
class Goodput:
    """The account of a run folder's time, in seconds."""

    total: float
    useful: float
    lost: dict[str, float]
    away: float
    """Seconds between commands, when nothing ran; not part of the total."""
    failures: int

    @property
    def share(self) -> float:
        """Useful time divided by total time."""
        return self.useful / self.total if self.total else 1.0

    def sentence(self) -> str:
        """The goodput and its losses in one line, for the end of a run."""
        losses = [
            f"{name} {clock(s)} ({s / self.total:.1%})" for name, s in self.lost.items() if s > 0.005 * self.total
        ]
        failed = f", {self.failures} failure{'s' * (self.failures > 1)}" if self.failures else ""
        rest = f"; lost: {', '.join(losses)}" if losses else ""
        return f"goodput {self.share:.1%} of {clock(self.total)}{failed}{rest}"

    def record(self) -> dict[str, float]:
        """The goodput and its losses as a metrics record."""
        seconds = {f"lost_{name.replace('-', '_')}": round(s, 3) for name, s in self.lost.items()}
        return {"goodput": round(self.share, 6), "total_seconds": round(self.total, 3), **seconds}


def goodput(
    events: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], now: float, command: str = ""
) -> Goodput:
    """The account of a folder's life so far; `command` is the calling command, which still runs. Computing takes precedence, so
    start-up is the time when a session was up but none computed, and waiting the time when none was up."""
    spans = _Spans()
    streams: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        streams.setdefault(event.get("command", ""), []).append(event)
    running = command or (events[-1].get("command", "") if events else "")
    for name, stream in streams.items():
        spans.add(stream, now if name == running else _last_sign(stream, events))
    lost = dict.fromkeys(LOSSES, 0.0)
    for event in events:
        if event["what"] in MEASURED:
            lost[MEASURED[event["what"]]] += event["seconds"]
    computing, up = _length(spans.computing), _length(spans.computing + spans.starting)
    total = _length(spans.computing + spans.starting + spans.waiting)
    lost["start-up"], lost["restarts"] = up - computing, total - up
    steps = [r for r in metrics if "seconds" in r]
    lost["skipped"] = sum(r["seconds"] for r in steps if r.get("skipped"))
    useful = min(total, sum(r["seconds"] for r in steps if not r.get("skipped")))
    lost["other"] = max(0.0, total - useful - sum(lost.values()))
    return Goodput(total, useful, lost, spans.life() - total, spans.failures)


class _Spans:
    """When the sessions of all commands were starting, computing, and waiting for a restart: pairs of times that may overlap."""

    def __init__(self) -> None:
        self.starting: list[tuple[float, float]] = []
        self.computing: list[tuple[float, float]] = []
        self.waiting: list[tuple[float, float]] = []
        self.failures = 0

    def add(self, events: Sequence[dict[str, Any]], last_sign: float) -> None:
        """Add the events of one command. A session is `begin` … `training` … `end` or `failed`; a session that was killed ends at
        its last sign of life."""
        begun: float | None = None
        trained: float | None = None
        ended: float | None = None
        failed = False
        last = 0.0
        for event in events:
            at, what = event["time"], event["what"]
            if what == "begin":
                if begun is not None:  # the previous session did not record its end
                    ended, failed = max(last, min(at, event.get("heard", 0.0))), False
                    self._close(begun, trained, ended)
                    self.failures += 1
                if ended is not None and failed and event.get("restart"):
                    self.waiting.append((ended, at))
                begun, trained = at, None
            elif what in ("end", "failed"):
                if begun is not None:
                    self._close(begun, trained, at)
                    self.failures += what == "failed"
                elif ended is not None and failed:  # given up, or asked to stop, while it waited
                    self.waiting.append((ended, at))
                begun, ended, failed = None, at, what == "failed"
            elif what in BY_RANKS:
                # Older files do not name an event's command: another session continues.
                if begun is None and ended is not None:
                    begun = trained = ended
                if what == "training" and trained is None:
                    trained = at
            last = at
        if begun is not None:
            self._close(begun, trained, max(last, last_sign))

    def _close(self, begun: float, trained: float | None, ended: float) -> None:
        self.starting.append((begun, ended if trained is None else trained))
        if trained is not None:
            self.computing.append((trained, ended))

    def life(self) -> float:
        """Seconds from the first start to the last end."""
        times = [time for span in (*self.starting, *self.computing, *self.waiting) for time in span]
        return max(times) - min(times) if times else 0.0


def _last_sign(stream: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> float:
    """When a dead command gave its last sign of life: the modification time of its metrics, recorded by the next session."""
    after = next(n for n, event in enumerate(events) if event is stream[-1]) + 1
    return next((event["heard"] for event in events[after:] if event.get("heard")), 0.0)


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """The total time covered by these spans; overlaps count once."""
    total, until = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return total
