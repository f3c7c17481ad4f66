"""Goodput: the share of all time spent on a run folder in which steps were computed that count.

The life of a folder is a sequence of sessions, each from the start of its ranks to their end, read from `events.jsonl`. The first
rank and the agent append to it, and unlike `metrics.jsonl` it is never truncated. Steps that count are those in `metrics.jsonl`
now. Everything else is a loss with a name: start-up, checkpoint stalls, evaluation, skipped steps, steps repeated after a failure
or a rollback, hangs, waiting between a failure and the next start, and what remains. Time between two commands is listed beside
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.report.words import clock
from shardwise.train.metrics import append_record, parse_record, read_lines

EVENTS_FILE = "events.jsonl"
LOSSES = ("start-up", "checkpoints", "evaluation", "skipped", "repeated", "hangs", "restarts", "other")
MEASURED = {"saved": "checkpoints", "evaluated": "evaluation", "repeat": "repeated", "hang": "hangs"}
"""Events that carry the seconds of a loss."""


def record_event(folder: Path, what: str, **values: Any) -> None:
    """Append one event with the current time."""
    append_record(folder / EVENTS_FILE, {"time": round(time.time(), 3), "what": what, **values})


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events so far."""
    return [event for line in read_lines(folder / EVENTS_FILE) if "what" in (event := parse_record(line))]


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run folder's life."""

    total: float
    useful: float
    lost: dict[str, float]
    away: float
    """Between commands, when nothing ran; not part of the total."""
    failures: int

    @property
    def share(self) -> float:
        """Useful time over all time."""
        return self.useful / self.total if self.total else 1.0

    def sentence(self) -> str:
        """For the end of a run."""
        losses = [
            f"{name} {clock(s)} ({s / self.total:.1%})" for name, s in self.lost.items() if s > 0.005 * self.total
        ]
        failed = f", {self.failures} failure{'s' * (self.failures > 1)}" if self.failures else ""
        rest = f"; lost: {', '.join(losses)}" if losses else ""
        return f"goodput {self.share:.1%} of {clock(self.total)}{failed}{rest}"

    def record(self) -> dict[str, float]:
        """For the metrics."""
        seconds = {f"lost_{name.replace('-', '_')}": round(s, 3) for name, s in self.lost.items()}
        return {"goodput": round(self.share, 6), "total_seconds": round(self.total, 3), **seconds}


def goodput(events: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], now: float) -> Goodput:
    """The account of a folder's life so far. A session is `begin` … `training` … `end` or `failed`; one that was killed ends
    with its last record."""
    lost = dict.fromkeys(LOSSES, 0.0)
    total = away = 0.0
    failures = 0
    begun: float | None = None
    ended: float | None = None
    training = failed = False
    last_event = now
    for event in events:
        at, what = event["time"], event["what"]
        if what == "begin":
            if begun is not None:  # the session before did not record its end
                last = max(begun, min(at, max(last_event, event.get("heard", 0.0))))
                total, ended, failures = total + last - begun, last, failures + 1
            if ended is not None:
                gap = max(0.0, at - ended)
                if failed and event.get("restart"):
                    lost["restarts"] += gap
                    total += gap
                else:
                    away += gap
            begun, training, failed = at, False, False
        elif what == "training" and begun is not None and not training:
            lost["start-up"] += max(0.0, at - begun)
            training = True
        elif what in ("end", "failed") and begun is not None:
            failed = what == "failed"
            failures += failed
            if not training:
                lost["start-up"] += at - begun
            total, ended, begun = total + at - begun, at, None
        elif what in MEASURED:
            lost[MEASURED[what]] += event["seconds"]
        last_event = at
    if begun is not None:
        total += now - begun
    steps = [r for r in metrics if "seconds" in r]
    lost["skipped"] = sum(r["seconds"] for r in steps if r.get("skipped"))
    useful = sum(r["seconds"] for r in steps if not r.get("skipped"))
    lost["other"] = max(0.0, total - useful - sum(lost.values()))
    return Goodput(total, useful, lost, away, failures)
