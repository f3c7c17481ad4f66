"""A job: a run with its machines, folder, command and time limit, the same for every scheduler. And the plan's estimate of it:
whether it fits, how long it takes, and so the time limit to request.

The requested time is that of all steps at the slow end of the plan's interval, plus failures, checkpoints and evaluations, one
start and a margin. Requesting too little costs a requeue; requesting too much costs a worse place in the queue.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.plan.plan import plan
from shardwise.report import words
from shardwise.run import Problem, Run, UserError
from shardwise.run.derive import planned_on_gpu

MARGIN = 1.1
ROUND = 300
"""Time limits are rounded up to a multiple of this many seconds."""


@dataclass(frozen=True)
class Estimate:
    """The plan's estimate of a job."""

    fits: bool
    memory: str
    """The memory of the fullest rank, as a sentence."""
    step_seconds: float
    expected: float
    """Expected seconds of the whole job."""
    limit: int
    """The time limit to request, in seconds."""


@dataclass(frozen=True)
class Job:
    """A run as a scheduler needs it."""

    run: Run
    name: str
    run_file: Path
    folder: Path
    """The run folder. It and `run_file` are absolute paths."""
    work: Path
    """The working directory of the command; paths in a run are relative to it."""
    command: tuple[str, ...]
    """The command line that calls `shardwise` on the machines."""
    overrides: tuple[str, ...] = ()
    limit: int = 0
    """The time limit in seconds; 0: the scheduler's default."""
    image: str = ""
    mounts: tuple[str, ...] = ()
    cpus_per_rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Options for the scheduler, in its own spelling."""
    notes: tuple[str, ...] = ()
    """The plan's figures, for comments at the top of the file."""

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return self.run.cluster.nodes

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each machine."""
        return self.run.cluster.devices_per_node

    @property
    def gpus(self) -> bool:
        """Whether each rank needs a GPU."""
        return planned_on_gpu(self.run)

    @property
    def train(self) -> str:
        """The shell command of a rank."""
        return shlex.join([*self.command, "train", str(self.run_file), "--out", str(self.folder), *self.overrides])


def scheduler_name(name: str) -> str:
    """The name of a run as a DNS label (RFC 1035), which Kubernetes requires and Slurm accepts."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}".rstrip("-")
    return label[:40].rstrip("-")


def estimate(run: Run) -> Estimate | None:
    """The plan's estimate of a run as a job; None if the run does not name the chip, so that no estimate is possible."""
    if not run.cluster.chip:
        return None
    found = plan(run)
    cost, train, account = found.cost, run.train, found.account
    # An evaluation has forward passes only: a third of a step's work.
    sequences = train.eval_sequences
    if train.samples:  # a microbatch of samples takes one forward pass of every rank's microbatch per token
        rounds = -(-train.samples // max(1, train.microbatch)) * train.sample_tokens
        sequences += rounds * max(1, train.microbatch) * run.layout.data_ranks
    each = account.step_seconds / 3 * sequences / train.global_batch
    evaluations = each * (train.steps // train.eval_every + 1) if train.eval_every else 0.0
    slow = found.high / account.step_seconds
    whole = cost.days * 86400 + evaluations
    asked = (whole * slow + cost.checkpoint_write_s) * MARGIN + run.cluster.restart_seconds
    memory = account.memory
    fits = f"{words.size(memory.peak)} of {words.size(memory.capacity)} on the fullest rank"
    return Estimate(
        found.fits,
        fits if found.fits else f"{fits}: does not fit ({found.binds})",
        account.step_seconds,
        whole + run.cluster.restart_seconds,
        math.ceil(asked / ROUND) * ROUND,
    )


def parse_time(text: str) -> int:
    """The seconds of a time limit in one of Slurm's formats: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text)
    if not found:
        reason = f'"{text[:40]}" is no time limit such as 90 (minutes), 12:00:00 or 2-00:00:00'
        raise UserError(Problem(reason, "--time", "command line"))
    days, *parts = (int(part) if part else 0 for part in found.groups())
    if found[1] or found[4]:
        seconds = parts[0] * 3600 + parts[1] * 60 + parts[2]
    elif found[3]:
        seconds = parts[0] * 60 + parts[1]
    else:
        seconds = parts[0] * 60
    if not (days or seconds):
        raise UserError(Problem("must be longer than nothing", "--time", "command line"))
    return days * 86400 + seconds


def time_text(seconds: int) -> str:
    """A time limit in Slurm's format, D-HH:MM:SS."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def requeues(expected: float, start: float, limit: int) -> int:
    """How often a job is requeued until it is done, if each time it spends `start` seconds starting and ends at the limit."""
    return max(0, math.ceil((expected - start) / max(60.0, limit - start)) - 1)
