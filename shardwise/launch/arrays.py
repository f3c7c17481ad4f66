"""Jobs of many like tasks as a Slurm array: those of a ladder, or those that prepare data. A task that is ended by Slurm is
put back into the queue; what its command did before is kept by the command, which goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.launch.job import scheduler_name

TASK = "$SLURM_ARRAY_TASK_ID"
"""The number of the task, for the command."""


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
    """The file for `sbatch`: `commands` once for each task. `after` is a job that has to succeed first. What tasks print is
    in the folder's `logs`, a file each."""
    lines = [f"--job-name={scheduler_name(name)}", f"--array=0-{tasks - 1}", f"--ntasks={ranks}"]
    lines += [f"--cpus-per-task={cpus}"] * bool(cpus)
    lines += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] * bool(after)
    lines += ["--requeue", "--open-mode=append", f"--output={folder.resolve() / 'logs' / 'slurm-%A-%a.out'}", *options]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "", "set -u", *commands, ""])
