"""A job: a run with the machines, folder, command and time that it is given, the same for every scheduler. And what the plan says
of it beforehand: whether it fits, how long it takes, and so which time to ask for.

The time asked for is that of all steps at the slow end of the plan's interval, with what failures, checkpoints and evaluations
take, one start and a margin. Asking for too little costs a requeue, for too much a worse place in the queue.
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
"""Seconds that a time limit is a multiple of."""


@dataclass(frozen=True)
class Estimate:
    """What the plan says of a job."""

    fits: bool
    memory: str
    """A sentence on the fullest rank."""
    step_seconds: float
    expected: float
    """Seconds of the whole job."""
    limit: int
    """Seconds to ask for."""


@dataclass(frozen=True)
class Job:
    """What a scheduler has to know."""

    run: Run
    name: str
    run_file: Path
    folder: Path
    """The run folder. It and the run's file are absolute."""
    work: Path
    """Where the command is started, since paths in a run are relative to it."""
    command: tuple[str, ...]
    """How `shardwise` is called on the machines."""
    overrides: tuple[str, ...] = ()
    limit: int = 0
    """Seconds; 0: what the scheduler gives by default."""
    image: str = ""
    mounts: tuple[str, ...] = ()
    cpus_per_rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """For the scheduler, as it spells them."""
    notes: tuple[str, ...] = ()
    """What was planned, for the head of the file."""

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.run.cluster.nodes

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each of them."""
        return self.run.cluster.devices_per_node

    @property
    def gpus(self) -> bool:
        """Whether each rank needs a GPU."""
        return planned_on_gpu(self.run)

    @property
    def train(self) -> str:
        """The command of a rank, for a shell."""
        return shlex.join([*self.command, "train", str(self.run_file), "--out", str(self.folder), *self.overrides])


def scheduler_name(name: str) -> str:
    """The name of a run as a label of DNS (RFC 1035), which Kubernetes demands and Slurm takes."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}".rstrip("-")
    return label[:40].rstrip("-")


def estimate(run: Run) -> Estimate | None:
    """What the plan says of a run as a job; None where the run does not name the chip, so that nothing can be said."""
    if not run.cluster.chip:
        return None
    found = plan(run)
    cost, train, account = found.cost, run.train, found.account
    # Forward passes alone, a third of a step's work.
    sequences = train.eval_sequences
    if train.samples:  # a pass of every rank's microbatch for each token of as many samples
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
    """Seconds of a time limit as Slurm writes them: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        reason = f'"{text}" is no time limit such as 90 (minutes), 12:00:00 or 2-00:00:00'
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
    """A time limit as Slurm reads it, D-HH:MM:SS."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def requeues(expected: float, start: float, limit: int) -> int:
    """How often a job comes back to the queue until it is done, where each time it starts anew and ends at the limit."""
    return max(0, math.ceil((expected - start) / max(60.0, limit - start)) - 1)
