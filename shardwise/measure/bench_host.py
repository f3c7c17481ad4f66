"""What the host adds to a step: trains networks too small to compute anything, and asks the planner what it would have said.

What a step takes beyond the planner's kernels is the host's, the price of Python, of autograd and of launching. More
microbatches tell what each kernel costs, more layers what the optimizer of one does, and the rest is the step's own: in
these numbers the planner then agrees with the trainer by construction.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from shardwise.data.batches import Batch
from shardwise.hardware import Profile
from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.time.step import prepare, step_time
from shardwise.run import Run, run_from_dict
from shardwise.train.step import TrainState

LAYERS, LENGTH, MORE = 2, 16, 3


def tiny_run(device: torch.device, chip: str, microbatches: int, layers: int) -> Run:
    """A run whose arithmetic takes no time to speak of."""
    model = dict(layers=layers, hidden=64, heads=2, ffn=128, vocab=128)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    train = dict(steps=100, seq_len=LENGTH, global_batch=microbatches, microbatch=1, dtype=dtype, device=device.type)
    return run_from_dict(dict(model=model, train=train, cluster=dict(chip=chip)))


def step_seconds(run: Run, most: float, fewest: int = 5) -> float:
    """Median seconds of a step on random tokens, within about `most` seconds."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, run.model.vocab, (run.train.global_batch, run.train.seq_len + 1))
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())
    train_state = TrainState(run)
    timed: list[float] = []
    ends = time.perf_counter() + most
    while len(timed) < fewest + 2 or (time.perf_counter() < ends and len(timed) < 50):
        start = time.perf_counter()
        train_state.train_step(batch).loss.item()
        timed.append(time.perf_counter() - start)
    return statistics.median(timed[2:])  # the first steps make the optimizer's state


def host_costs(device: torch.device, profile: Profile, most: float) -> Profile:
    """The profile with the seconds of a launch, of a step and of a layer in it besides, as the planner counts them."""
    shapes = {"plain": (1, LAYERS), "microbatches": (MORE, LAYERS), "layers": (1, MORE * LAYERS)}
    runs = {name: tiny_run(device, profile.chip, *shape) for name, shape in shapes.items()}
    timed = {name: step_seconds(run, most / len(runs)) for name, run in runs.items()}
    jobs = {name: with_profile(job_of(run), profile) for name, run in runs.items()}
    # A GPU works while the host launches; a CPU does one after the other.
    busy = {name: _predicted(job) if device.type == "cpu" else 0.0 for name, job in jobs.items()}
    launches = {name: float(sum(prepare(job).stages[0].launches)) for name, job in jobs.items()}

    def host(name: str) -> float:
        return max(timed[name] - busy[name], 0.0)

    launch = max(host("microbatches") - host("plain"), 1e-9) / ((MORE - 1) * launches["plain"])
    more = host("layers") - host("plain") - launch * (launches["layers"] - launches["plain"])
    layer = max(more, 0.0) / ((MORE - 1) * LAYERS)
    known = launch * launches["plain"] + layer * LAYERS
    # Noise may leave the step less than its parts: then they are taken down to it.
    share = min(1.0, max(host("plain"), 1e-9) / known)
    overhead = max(host("plain") - known, 0.0)
    return replace(profile, launch=share * launch, overhead=overhead, layer_overhead=share * layer)


def with_profile(job: Job, profile: Profile) -> Job:
    """The job on the machine that was measured."""
    return replace(job, cluster=replace(job.cluster, chip=replace(job.cluster.chip, profile=profile), profile=profile))


def _predicted(job: Job) -> float:
    """Seconds of a step without the host."""
    constants = constants_of(job) | {"launch": 0.0, "overhead": 0.0}
    return step_time(prepare(job), constants).seconds
