"""The whole job, not one step: failures, checkpoints and restarts, and the job's cost in time, devices, energy and money.

M is the time between failures of the whole cluster, d the seconds that a checkpoint stalls training, r those of a restart.
The checkpoint interval that loses least time is sqrt(2 d M) (Young 1974, Daly 2006); it is assumed where a run does not say how
often to checkpoint. An interval of T seconds takes (M + r)(exp((T + d) / M) - 1) until it is done: while failures are rare, the
loss is d, and for each failure half of T and the restart. Training waits only while the state is copied to the host's memory.
Writing it takes w seconds in the background, so the interval is no shorter than w, and a failure also loses the w since the last
complete checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.hardware import Cluster
from shardwise.run import Run

NEVER = 40.0
"""Expected failures in an interval at which counting stops: such a run does not end."""


@dataclass(frozen=True)
class JobCost:
    """The whole job."""

    days: float
    device_hours: float
    usd: float
    kwh: float
    goodput: float
    """Useful time over all time."""
    failures: float
    checkpoint_every_s: float
    checkpoint_stall_s: float
    """Seconds that training waits for a checkpoint."""
    checkpoint_write_s: float
    """Seconds until a checkpoint is on disk."""
    usd_per_hour: float = 0.0
    """Price of all devices together; 0 where none is known."""


def data_stall(run: Run, cluster: Cluster, step_seconds: float) -> float:
    """Seconds a step waits for its batch. Batches are read one step ahead, so a step waits only where reading takes longer than a
    step."""
    return max(0.0, reading_seconds(run, cluster, run.layout.data_ranks, run.layout.world) - step_seconds)


def reading_seconds(run: Run, cluster: Cluster, data_ranks: int, devices: int) -> float:
    """Seconds in which a machine reads its samples of a batch. Each rank reads the samples of its data rank for itself."""
    width = 2 if run.model.vocab <= 2**16 else 4
    here = min(devices, cluster.per_node)
    return run.batch_tokens / data_ranks * width * here / (run.cluster.storage_gbs * 1e9)


def job_cost(run: Run, cluster: Cluster, step_seconds: float, devices: int, checkpoint_bytes: float) -> JobCost:
    """Time, devices, money and energy of all steps, including failures and checkpoints."""
    c = run.cluster
    machines = max(1.0, devices / cluster.per_node)
    between = c.mtbf_hours * 3600 / devices
    stall = checkpoint_bytes / (c.host_gbs * 1e9 * devices)
    write = checkpoint_bytes / (c.storage_gbs * 1e9 * machines)
    useful = step_seconds * run.train.steps
    wanted = run.train.checkpoint_every * step_seconds or math.sqrt(2 * stall * between)
    interval = min(max(wanted, write, step_seconds), max(useful, step_seconds))
    attempts = math.expm1(min((interval + stall) / between, NEVER)) * between / interval
    total = useful * attempts * (1 + (write + c.restart_seconds) / between)
    hours = total / 3600 * devices
    price = c.price or cluster.chip.price
    # Chips draw close to their limit while training; hosts, network and cooling add about half as much again.
    kwh = hours * min(c.power_w or math.inf, cluster.chip.power) / 1000 * 1.5
    efficiency, failures, hourly = useful / total, total / between, price * devices
    return JobCost(total / 86400, hours, hours * price, kwh, efficiency, failures, interval, stall, write, hourly)
