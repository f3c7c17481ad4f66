"""A run's numbers as they are made: `metrics.jsonl` always, TensorBoard and Weights & Biases when the run asks.

One JSON object a step and one an evaluation. A resumed run cuts the file back to the step it resumes from, so that every
step stands there once; it is cut in place, so that a crash meanwhile loses none of what is kept.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.run import Run, UserError, to_dict
from shardwise.train import records

FILE = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder."""
    return [record for line in records.lines_of(folder / FILE) if (record := _parse(line))]


def _parse(line: bytes) -> dict[str, Any]:
    record = records.parse(line)
    return record if isinstance(record.get("step"), int) else {}


class Metrics:
    """Writes records, each at once, so that a crash loses none."""

    def __init__(self, folder: Path, run: Run, log: Callable[[str], None], resumed_step: int = 0) -> None:
        dropped = [r["seconds"] for r in read_metrics(folder) if r["step"] > resumed_step and "seconds" in r]
        self.dropped_steps, self.dropped_seconds = len(dropped), sum(dropped)
        self.path, self.log = folder / FILE, log
        self.writable = True
        if self.path.exists():
            os.truncate(self.path, _length_up_to(self.path, resumed_step))
        self.board = _open_tensorboard(folder, resumed_step) if run.train.tensorboard else None
        self.wandb = _open_wandb(folder, run) if run.train.wandb else None

    def record(self, **values: Any) -> None:
        """Append one record. JSON has no NaN, so a number that is not finite is written as text."""
        clean = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        problem = records.append(self.path, clean)
        if problem is not None and self.writable:
            self.log(f"warning: {self.path} cannot be written: {problem.strerror}; training goes on without")
        self.writable = problem is None
        numbers = {k: v for k, v in values.items() if k != "step" and not isinstance(v, list)}
        if self.board is not None:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, values["step"])
        if self.wandb is not None:
            self.wandb.log(numbers, step=values["step"])

    def close(self) -> None:
        """Flush and close everything."""
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def _length_up_to(path: Path, step: int) -> int:
    """Bytes of the file's first lines that are whole and of no later step; damaged ones among them stay as they are."""
    length = 0
    for line in records.lines_of(path)[:-1]:
        if _parse(line).get("step", 0) > step:
            break
        length += len(line) + 1
    return length


def _open_tensorboard(folder: Path, resumed_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("train.tensorboard needs TensorBoard: pip install 'shardwise[tensorboard]'") from None
    # Events past the step that is resumed from would otherwise be shown twice.
    return SummaryWriter(folder / "tensorboard", purge_step=resumed_step + 1)


def _open_wandb(folder: Path, run: Run) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("train.wandb needs Weights & Biases: pip install 'shardwise[wandb]'") from None
    return wandb.init(
        project=run.train.wandb, name=run.name, dir=folder, config=to_dict(run), resume="allow", id=run.name
    )
