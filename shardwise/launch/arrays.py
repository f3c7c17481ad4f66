"""Jobs of many similar tasks as a Slurm array: those of a scaling ladder, or those that prepare data. A task that Slurm ends is
requeued; its command keeps the work done so far and continues where it stopped."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shardwise.launch.job import scheduler_name

TASK = "$SLURM_ARRAY_TASK_ID"
"""The task's number, for use in the command."""


def array_script(
    name: str,
    tasks: int,
    commands: Sequence[str],
    folder: Path,
    *,
    after: str = "",
    ranks: int = 1,
    cpus: int = 0,
    options: Sequence[str] = (),
) -> str:
    """The file for `sbatch`: runs `commands` once for each task. `after` is the id of a job that has to succeed first. Each task's
    output goes to its own file in the folder's `logs`."""
    lines = [f"--job-name={scheduler_name(name)}", f"--array=0-{tasks - 1}", f"--ntasks={ranks}"]
    lines += [f"--cpus-per-task={cpus}"] * bool(cpus)
    lines += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] * bool(after)
    log = folder.resolve() / "logs" / "slurm-%A-%a.out"
    lines += ["--requeue", "--open-mode=append", f"--output={shlex.quote(str(log))}", *options]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "", "set -u", *commands, ""])
