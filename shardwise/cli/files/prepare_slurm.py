"""Runs a recipe as Slurm arrays: a job for each stage, each after the previous one, and a final one. Finished stages are not
submitted again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from shardwise.data.prepare.prepare import STATISTICS, begin
from shardwise.data.prepare.recipe import Recipe
from shardwise.data.prepare.stages import WORK, missing
from shardwise.launch.arrays import TASK, array_script
from shardwise.launch.submission import FOLDER, Submission, submit
from shardwise.run.problems import Problem, UserError

FINISH = "finish"


def submit_recipe(
    recipe: Recipe, file: Path, out: Path, workers: int, options: list[str], restart: bool
) -> list[Submission]:
    """Write and submit the jobs; each array has `workers` tasks."""
    if workers < 1:
        raise UserError(Problem("is needed for Slurm: the tasks of each array", "--workers"))
    plan = begin(recipe, file.resolve().parent, out, restart)
    if (out / STATISTICS).exists():
        return []
    command = [sys.executable, "-m", "shardwise", "data", "prepare", str(file.resolve()), "--out", str(out.resolve())]
    (out / FOLDER).mkdir(exist_ok=True)
    (out / "logs").mkdir(exist_ok=True)
    jobs: list[Submission] = []

    def add(name: str, tasks: int, more: list[str]) -> None:
        words = f"{shlex.join([*command, '--stage', name])} {' '.join(more)}".rstrip()
        path = out / FOLDER / f"{name}.sbatch"
        after = jobs[-1].id if jobs else ""
        path.write_text(array_script(f"prepare-{name}", tasks, [words], out, after=after, options=options))
        jobs.append(submit("slurm", path, out, log=str(out.resolve() / "logs" / "slurm-%j-0.out")))

    for stage in plan.stages():
        if left := len(missing(out / WORK, stage)):
            shares = min(workers, left)
            add(stage.name, shares, ["--share", f'"{TASK}/{shares}"'])
    add(FINISH, 1, [])
    return jobs
