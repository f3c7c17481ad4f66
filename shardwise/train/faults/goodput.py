"""Goodput: of all the time a run folder has been worked on, the share in which steps were computed that count.

The life of a folder is a row of sessions, each from the start of its ranks to their end, read from `events.jsonl`. Steps that
count are those that stand in `metrics.jsonl` now. Everything else is a loss with a name: start-up, checkpoint stalls,
evaluation, steps that were refused, steps that were lost to a failure or a rollback and computed again, hangs, waiting between a
failure and the next start, and what remains unexplained. Time in which nothing ran, between two commands, is told beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.report.words import clock

LOSSES = ("start-up", "checkpoints", "evaluation", "skipped", "repeated", "hangs", "restarts", "other")


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
        numbers = {f"lost_{name.replace('-', '_')}": round(s, 3) for name, s in self.lost.items()}
        return {"goodput": round(self.share, 6), "total_seconds": round(self.total, 3), **numbers}


def goodput(events: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], now: float) -> Goodput:
    """The account of a folder's life so far. A session is `begin` … `training` … `end` or `failed`; one that was cut off ends
    with the last thing heard of it."""
    lost = dict.fromkeys(LOSSES, 0.0)
    total = away = 0.0
    failures = 0
    begun: float | None = None
    training = False
    heard = now
    ended: float | None = None
    failed = False
    for event in events:
        at, what = event["time"], event["what"]
        if what == "begin":
            if begun is not None:  # nobody told of the end of the session before
                last = max(begun, min(at, max(heard, event.get("heard", 0.0))))
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
        elif what == "saved":
            lost["checkpoints"] += event["seconds"]
        elif what == "evaluated":
            lost["evaluation"] += event["seconds"]
        elif what == "repeat":
            lost["repeated"] += event["seconds"]
        elif what == "hang":
            lost["hangs"] += event["seconds"]
        heard = at
    if begun is not None:
        total += now - begun
    steps = [r for r in metrics if "seconds" in r]
    lost["skipped"] = sum(r["seconds"] for r in steps if r.get("skipped"))
    useful = sum(r["seconds"] for r in steps if not r.get("skipped"))
    lost["other"] = max(0.0, total - useful - sum(lost.values()))
    return Goodput(total, useful, lost, away, failures)
