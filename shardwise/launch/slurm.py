"""The script for `sbatch`: one `srun` task for each rank, in Slurm's own order of machines.

A run that is asked to stop saves and exits with code 75; the script then requeues the job, which resumes when it starts again. That
happens ahead of the time limit (`--signal`), on preemption, and when a user signals a rank. If Slurm ends the job itself, because
it is cancelled or a machine is lost, the script leaves it to Slurm whether to requeue the job. After any other failure the script
starts the ranks again in the same allocation, up to `train.restarts` times without a new checkpoint in between.

Jobs of many similar tasks, those of a scaling ladder or those that prepare data, are an array. A task that Slurm ends is requeued;
its command keeps the work done so far and continues where it stopped.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shardwise.launch.job import Job, scheduler_name, time_text
from shardwise.train.faults.ranks import DOUBLINGS, MISTAKE
from shardwise.train.faults.stop import PREEMPTED

EARLY = 90
"""Seconds, in addition to `train.save_deadline`, that the signal comes ahead of the limit: Slurm may send it a minute late."""
WAIT = 60
"""Seconds that the other ranks have to end after the first one has ended."""
TASK = "$SLURM_ARRAY_TASK_ID"
"""The number of an array's task, for use in its command."""


def log_file(job: Job) -> str:
    """The file for the job's output; Slurm replaces %j by the job's number."""
    return str(job.folder / "logs" / "slurm-%j.out")


def directives(job: Job) -> list[str]:
    """The options of `sbatch`."""
    ahead = min(65535, round(job.run.train.save_deadline) + EARLY)
    lines = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--ntasks-per-node={job.ranks_per_node}"]
    lines += [f"--cpus-per-task={job.cpus_per_rank}"] * bool(job.cpus_per_rank)
    lines += [f"--gpus-per-node={job.ranks_per_node}"] * job.gpus
    lines += [f"--time={time_text(job.limit)}"] * bool(job.limit)
    lines += [f"--signal=USR1@{ahead}", "--requeue", "--open-mode=append"]
    lines += [f"--chdir={shlex.quote(str(job.work))}", f"--output={shlex.quote(log_file(job))}"]
    return [*lines, *job.options]


def _srun(job: Job) -> str:
    words = ["srun", "--kill-on-bad-exit=0", f"--wait={WAIT}"]
    words += [f"--cpus-per-task={job.cpus_per_rank}"] * bool(job.cpus_per_rank)
    if job.image:
        places = dict.fromkeys([str(job.work), str(job.folder), str(job.run_file.parent)])
        mounts = ",".join([*(f"{place}:{place}" for place in places), *job.mounts])
        words += [f"--container-image={job.image}", f"--container-mounts={mounts}", f"--container-workdir={job.work}"]
    return f"{shlex.join(words)} \\\n    {job.train}"


def script(job: Job) -> str:
    """The whole file."""
    train = job.run.train
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items())
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in directives(job)),
            "",
            *(f"# {note}" for note in job.notes),
            "set -u",
            f"folder={shlex.quote(str(job.folder))}",
            'newest() { ls "$folder/checkpoints" 2>/dev/null | grep -E "^step-[0-9]+$" | sort | tail -n 1; }',
            "",
            "# Where the ranks meet: the first machine, by the address at which Slurm itself reaches it.",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "address=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
            'export MASTER_ADDR="${address:-$first}"',
            exports,
            "starts=0 failures=0",
            "while :; do",
            "  export MASTER_PORT=$((20000 + (SLURM_JOB_ID + starts) % 20000)) starts=$((starts + 1))",
            "  before=$(newest)",
            "  " + _srun(job),
            "  code=$?",
            "  case $code in",
            f"  0 | {MISTAKE}) exit $code ;;",
            f"  {PREEMPTED})",
            "    # Told to stop, and saved. Where Slurm is ending the job, it also decides what becomes of it.",
            '    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)',
            '    [ "$state" = RUNNING ] && scontrol requeue "$SLURM_JOB_ID"',
            f"    exit {PREEMPTED} ;;",
            "  esac",
            '  [ "$(newest)" = "$before" ] || failures=0',
            "  failures=$((failures + 1))",
            f'  echo "the ranks ended with exit code $code (failure $failures of {train.restarts + 1})" >&2',
            f"  [ $failures -le {train.restarts} ] || exit $code",
            f"  sleep $(({max(1, round(train.restart_wait))} << (failures > {DOUBLINGS} ? {DOUBLINGS} : failures - 1)))",
            "done",
            "",
        ]
    )


def array_script(
    name: str,
    tasks: int,
    commands: Sequence[str],
    folder: Path,
    *,
    after: str = "",
    nodes: int = 1,
    ranks: int = 1,
    gpus: bool = False,
    options: Sequence[str] = (),
) -> str:
    """The file for `sbatch`: runs `commands` once for each task, on `nodes` machines with `ranks` each, and a GPU for each rank if
    `gpus`. `after` is the id of a job that has to succeed first. Each task's output goes to its own file in the folder's `logs`."""
    lines = [f"--job-name={scheduler_name(name)}", f"--array=0-{tasks - 1}", f"--nodes={nodes}"]
    lines += [f"--ntasks-per-node={ranks}", *[f"--gpus-per-node={ranks}"] * gpus]
    lines += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] * bool(after)
    log = folder.resolve() / "logs" / "slurm-%A-%a.out"
    lines += ["--requeue", "--open-mode=append", f"--output={shlex.quote(str(log))}", *options]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "", "set -u", *commands, ""])
