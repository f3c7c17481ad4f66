"""Run folders as points: parameters and tokens from the run file in the folder, loss from its metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from shardwise.run import Problem, Run, UserError, read_run
from shardwise.run.parameters import first_parameters, last_parameters, layer_parameters
from shardwise.run.problems import unreadable
from shardwise.scale.points import Points, make_points

RUN, METRICS = "run.toml", "metrics.jsonl"


def is_run_folder(path: str | Path) -> bool:
    """Whether `path` is a folder that `shardwise train` made."""
    return (Path(path) / METRICS).is_file()


def read_runs(folders: Sequence[str | Path], loss: str = "eval_loss") -> Points:
    """The last recorded loss of each folder. A run that did not reach its last step is refused: its learning rate has not decayed
    yet, so its loss is not comparable with the others."""
    found, problems = [], []
    for folder in map(Path, folders):
        try:
            run = read_run(folder / RUN)
            steps, value = _last(folder, loss)
        except UserError as e:
            problems += e.problems
            continue
        if steps < run.train.steps:
            problems.append(
                Problem(f"ended at step {steps} of {run.train.steps}: train it to its end", where=str(folder))
            )
            continue
        if not (math.isfinite(value) and value > 0):
            problems.append(Problem(f"ended with {loss} {value}: leave it out", where=str(folder)))
            continue
        found.append((folder.name, float(count(run)), float(run.train.steps * run.batch_tokens), value))
    if problems:
        raise UserError(*problems)
    names, params, tokens, losses = zip(*found, strict=True)
    return make_points(params, tokens, losses, names)


def count(run: Run) -> int:
    """Parameters of the whole model."""
    model = run.model
    layers = [entry for n in range(model.layers) for entry in layer_parameters(model, model.is_moe(n))]
    return sum(entry.numel for entry in (*first_parameters(model), *layers, *last_parameters(model)))


def _last(folder: Path, loss: str) -> tuple[int, float]:
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as e:
        raise unreadable(e, where=folder / METRICS) from None
    for line in reversed(lines):
        try:
            record = json.loads(line)
            return int(record["step"]), float(record[loss])
        except (ValueError, KeyError, TypeError):
            continue
    raise UserError(Problem(f'has no record of "{loss}": set train.eval_every', where=str(folder / METRICS)))
