"""How long a step of this trainer takes, for benchmarks that compare runs of it one after the other in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from shardwise.data.batches import Batch
from shardwise.measure.verify import random_batch
from shardwise.plan.cost.flops import CONVENTION, parameters, training_flops
from shardwise.run import Run
from shardwise.train.step import TrainState

WARM_UP = 4


def seconds_of(work: Callable[[], object], cuda: bool) -> float:
    """Of one call, on the device's clock."""
    if not cuda:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(run: Run, steps: int, name: str, batch: Batch | None = None) -> dict[str, Any]:
    """One run on random tokens, or on a batch: its step's time, memory and rate."""
    cuda = run.train.device == "cuda"
    began = time.perf_counter()
    train_state, batch = TrainState(run), batch or random_batch(run)
    taken = []
    for n in range(WARM_UP + steps):
        taken.append(seconds_of(lambda: train_state.train_step(batch), cuda))
        if n == 0:
            first = time.perf_counter() - began
        if n == 1 and cuda:  # the first steps also hold what compiling needed
            torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(taken[WARM_UP:])
    count = parameters(run.model)
    return {
        "run": name,
        "microbatch": run.train.microbatch,
        "parameters": count.total,
        "active": count.active,
        "step_ms": seconds * 1e3,
        "slowest_ms": max(taken[WARM_UP:]) * 1e3,
        "tokens_per_s": run.batch_tokens / seconds,
        "tflops": training_flops(run.model, run.train.seq_len) * run.batch_tokens / seconds / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "first_step_s": first,
        "convention": CONVENTION,
    }
