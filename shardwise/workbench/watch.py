"""Runs watched while they train, or afterwards: the data that a page gets from their folders, and the plan of each run beside
it."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from shardwise.plan.plan import plan
from shardwise.run import Problem, UserError, read_planned
from shardwise.run.second_models.named_model import RUN_FILE
from shardwise.workbench.follow import FollowedRun, run_folders

MOST_RUNS = 64
MOST_COLUMNS = 4000
SHOWN_SAMPLES = 12
"""Evaluations whose text samples a page shows."""
RESCAN = 3.0
"""Seconds between scans for new runs."""
PATIENCE = 0.25
"""Seconds that one question may spend reading files that are not read to their ends yet."""

Stamp = tuple[int, int, int]
"""Size, time of the last change, and inode of a file."""


class Watch:
    """The runs in a folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(
                Problem("is no folder; `watch` takes the folder of a run, or one of several runs", where=str(folder))
            )
        self.folder = folder.resolve()
        self.runs: dict[str, FollowedRun] = {}
        self.left_out = 0
        """Runs that are not followed, because there are more than `MOST_RUNS`."""
        self._planned: dict[str, tuple[Stamp | None, dict[str, Any] | None]] = {}
        self._scanned = -math.inf
        self._lock = Lock()

    def look(self) -> None:
        """Look for new runs and new lines."""
        began = time.monotonic()
        if began - self._scanned > RESCAN:
            self._scanned = began
            found = run_folders(self.folder)
            for folder in found[:MOST_RUNS]:
                inside = folder.relative_to(self.folder).as_posix()
                name = self.folder.name if inside == "." else inside
                if name not in self.runs:
                    self.runs[name] = FollowedRun(folder, name)
            self.left_out = len(set(found) - {run.folder for run in self.runs.values()})
        for run in self.runs.values():
            run.look()
            while run.more and time.monotonic() - began < PATIENCE:
                run.look()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The data, if it is newer than the versions that the page has seen."""
        asked = Asked.of(question)
        with self._lock:
            self.look()
            versions = {"": self.left_out} | {name: run.version for name, run in self.runs.items()}
            # Goodput also changes as time passes; that alone does not count as new.
            if asked.seen == versions:
                return {"unchanged": True}
            now = time.time()
            chosen = [run for name, run in self.runs.items() if not asked.runs or name in asked.runs]
            return {
                "versions": versions,
                "runs": [run.summary(now) for run in self.runs.values()],
                "left_out": self.left_out,
                "series": {run.name: self._pictures(run, asked) for run in chosen},
                "ranks": {run.name: _ranks(run) for run in chosen},
                "samples": {run.name: list(run.samples)[-SHOWN_SAMPLES:] for run in chosen},
                "events": {run.name: list(run.events)[-200:] for run in chosen},
                "planned": {run.name: self.planned(run) for run in chosen},
            }

    def _pictures(self, run: FollowedRun, asked: Asked) -> dict[str, Any]:
        shown = [key for key in run.series if not asked.metrics or key in asked.metrics]
        return {key: run.series[key].picture(asked.low, asked.high, asked.columns) for key in shown}

    def run_file(self, name: str) -> Path:
        """The run file that a folder was trained with."""
        if name not in self.runs:
            raise UserError(f'no run is called "{name[:100]}"')
        return self.runs[name].folder / RUN_FILE

    def planned(self, run: FollowedRun) -> dict[str, Any] | None:
        """The planned speed and memory of a run; None if its run file cannot be planned, or is not there yet."""
        file = run.folder / RUN_FILE
        stamp = stamp_of(file)
        if run.name not in self._planned or self._planned[run.name][0] != stamp:
            self._planned[run.name] = stamp, _figures(file)
        return self._planned[run.name][1]


def stamp_of(file: Path) -> Stamp | None:
    """What changes when a file is written anew: a run's own is written after its first events, and again when it resumes."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _figures(file: Path) -> dict[str, Any] | None:
    """The planned figures of a run file; None if it cannot be planned."""
    try:
        found = plan(read_planned(file).run)
    except (UserError, ValueError, KeyError, OSError):
        return None
    account, seconds = found.account, found.account.step_seconds
    ratio = (found.low / seconds, found.high / seconds)
    return {
        "seconds": [seconds, found.low, found.high],
        "tokens_per_s": [account.tokens_per_second, *(account.tokens_per_second / r for r in ratio[::-1])],
        "mfu": [found.mfu, *(found.mfu / r for r in ratio[::-1])],
        "memory_gib": [account.memory.peak / 2**30],
        "steps": found.run.train.steps,
        "chip": found.job.cluster.chip.name,
    }


@dataclass(frozen=True)
class Asked:
    """A question of the page; invalid fields are replaced by defaults."""

    seen: dict[str, int]
    runs: list[str]
    metrics: list[str]
    low: float
    high: float
    columns: int

    @classmethod
    def of(cls, question: Any) -> Asked:
        """Parse a question; raises if it is not one."""
        if not isinstance(question, dict):
            raise UserError("a question is an object")
        seen, columns = question.get("seen"), question.get("columns")
        return cls(
            seen if isinstance(seen, dict) else {},
            _texts(question.get("runs")),
            _texts(question.get("metrics")),
            _bound(question.get("low"), -math.inf),
            _bound(question.get("high"), math.inf),
            max(16, min(MOST_COLUMNS, columns)) if type(columns) is int else 800,
        )


def _texts(given: Any) -> list[str]:
    return [each for each in given if isinstance(each, str)] if isinstance(given, list) else []


def _bound(given: Any, limit: float) -> float:
    try:
        number = float(given) if type(given) in (int, float) else limit
    except OverflowError:
        return limit
    return number if math.isfinite(number) else limit


def _ranks(run: FollowedRun) -> dict[str, Any]:
    """Each rank's own seconds, in the last 60 comparisons."""
    latest = list(run.ranks)[-60:]
    return {"steps": [step for step, _ in latest], "seconds": [seconds for _, seconds in latest]}
