"""A run's metrics: `metrics.jsonl` always, TensorBoard and Weights & Biases if the run asks for them.

There is one JSON object per step and one per evaluation; docs/checkpoints.md lists their keys. A resumed run truncates the file to
the step it resumes from, so that it has every step once. It truncates in place, so that a crash meanwhile loses nothing.

Record files (metrics and events) are only appended to. A line is one write, so lines of two writers do not mix, and a crash or a
damaged disk loses only the records it hit. A record that cannot be written, for instance on a full disk, is left out: it must not
end the run.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.files import write_atomically
from shardwise.run import Run, UserError, to_dict
from shardwise.run.problems import install

FILE = "metrics.jsonl"
WANDB, WANDB_ID = "the run at Weights & Biases", "wandb-id"


def append_record(path: Path, record: dict[str, Any]) -> OSError | None:
    """Append a record; returns the error if it could not be written."""
    line = json.dumps(record) + "\n"
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            length = os.fstat(file).st_size
            torn = length > 0 and os.pread(file, 1, length - 1) != b"\n"  # the last write was interrupted
            os.write(file, b"\n" * torn + line.encode())
        finally:
            os.close(file)
    except OSError as e:
        return e
    return None


def parse_record(line: bytes) -> dict[str, Any]:
    """The record in a line; empty if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file; the last one is the text after the last newline."""
    return path.read_bytes().split(b"\n") if path.exists() else []


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder."""
    return [record for line in read_lines(folder / FILE) if (record := _parse(line))]


def _parse(line: bytes) -> dict[str, Any]:
    record = parse_record(line)
    return record if isinstance(record.get("step"), int) else {}


class Metrics:
    """Writes every record immediately, so that a crash loses none."""

    def __init__(self, folder: Path, run: Run, log: Callable[[str], None], resumed_step: int = 0) -> None:
        dropped = [r["seconds"] for r in read_metrics(folder) if r["step"] > resumed_step and "seconds" in r]
        self.path, self.log = folder / FILE, log
        self.writable = True
        heard = self.path.stat().st_mtime if self.path.exists() else 0.0
        self.repeats = dict(heard=heard, steps=len(dropped), seconds=sum(dropped))
        """When the last session wrote here, and the steps that this one repeats, with their seconds."""
        with self._tolerated(self.path):
            if self.path.exists():
                os.truncate(self.path, _length_up_to(self.path, resumed_step))
        self.board = self.wandb = None
        with self._tolerated("TensorBoard's file"):
            self.board = _open_tensorboard(folder, resumed_step) if run.train.tensorboard else None
        with self._tolerated(WANDB, Exception):
            self.wandb = _open_wandb(folder, run, self._wandb_id(folder)) if run.train.wandb else None

    def record(self, **values: Any) -> None:
        """Append one record. JSON has no NaN, so a non-finite number is written as text."""
        clean = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        problem = append_record(self.path, clean)
        if problem is not None and self.writable:
            self.log(f"warning: {self.path} cannot be written: {problem.strerror}; training goes on without it")
        self.writable = problem is None
        numbers = {k: v for k, v in values.items() if k != "step" and not isinstance(v, list)}
        if self.board is not None:
            board, self.board = self.board, None
            with self._tolerated("TensorBoard's file"):
                for key, value in numbers.items():
                    board.add_scalar(key, value, values["step"])
                self.board = board  # after a failure it stays None: else it would fail at every step
        if self.wandb is not None:
            service, self.wandb = self.wandb, None
            with self._tolerated(WANDB, Exception):
                service.log(numbers, step=values["step"])
                self.wandb = service

    def _wandb_id(self, folder: Path) -> str:
        """The Weights & Biases id of this folder's run. Two folders may have a run of the same name; one folder has one run,
        however often it is started."""
        path = folder / WANDB_ID
        known = path.read_text(errors="replace").strip() if path.exists() else ""
        identity = known or secrets.token_hex(8)
        if not known:
            with self._tolerated(path):
                write_atomically(path, f"{identity}\n".encode())
        return identity

    @contextmanager
    def _tolerated(self, what: object, errors: type[Exception] = OSError) -> Iterator[None]:
        """Turn an error into a warning: a disk that cannot be written, or a service that cannot be reached, loses records, but must
        not end the run."""
        try:
            yield
        except UserError:
            raise
        except errors as e:
            reason = getattr(e, "strerror", None) or next(iter(str(e).splitlines()), type(e).__name__)
            self.log(f"warning: {what} cannot be written: {reason}; training goes on without it")

    def close(self) -> None:
        """Flush and close everything."""
        if self.board is not None:
            with self._tolerated("TensorBoard's file"):
                self.board.close()
        if self.wandb is not None:
            with self._tolerated(WANDB, Exception):
                self.wandb.finish()


def _length_up_to(path: Path, step: int) -> int:
    """The length in bytes of the file's leading complete lines up to a step; damaged lines among them are kept."""
    length = 0
    for line in read_lines(path)[:-1]:
        if _parse(line).get("step", 0) > step:
            break
        length += len(line) + 1
    return length


def check_installed(run: Run) -> None:
    """Raise an error if a package that the metrics need is missing."""
    asked = {"tensorboard": run.train.tensorboard, "wandb": run.train.wandb}
    missing = [_missing(package) for package, wanted in asked.items() if wanted and find_spec(package) is None]
    if missing:
        raise UserError(*missing)


def _missing(package: str) -> str:
    called = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}[package]
    return f"train.{package} needs {called}: {install(package)}"


def _open_tensorboard(folder: Path, resumed_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(_missing("tensorboard")) from None
    # Events after the resumed step would otherwise be shown twice.
    return SummaryWriter(folder / "tensorboard", purge_step=resumed_step + 1)


def _open_wandb(folder: Path, run: Run, identity: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(_missing("wandb")) from None
    return wandb.init(
        project=run.train.wandb, name=run.name, dir=folder, config=to_dict(run), resume="allow", id=identity
    )
