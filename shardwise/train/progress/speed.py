"""Speed and memory: the peak FLOP/s for MFU, the memory in use, and stragglers, which are ranks whose own work takes longer than
that of the others, so that all wait for them.

All ranks take equally long for a step, since they wait for each other; they differ in the time they do not wait. On a CPU that is
the time the training thread ran or was ready to run, as Linux accounts it: it shows both a slow core and a core shared with others.
On a GPU, kernels that compute and kernels that wait for other ranks look the same without a profiler, so every rank times the same
GEMM between two steps: this shows a throttled or shared GPU, but not a slow host.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.hardware.chips import chip_of_driver_name

STRAGGLER = 1.2
"""A rank whose time is at least this multiple of the median is reported."""
PROBE_SIZE = 4096
LONGEST_MEASUREMENT = 0.2
"""Seconds of GEMMs after which no further GEMM starts."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """The peak FLOP/s to measure a run against, and the source of that number: the vendor's figure for a known GPU, otherwise the
    best of a few GEMMs timed here."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        chip = chip_of_driver_name(torch.cuda.get_device_name(device))
        if chip is not None and name in chip.peak:
            return chip.peak[name], f"{chip.name}'s {name} peak of {chip.peak[name] / 1e12:,.0f} TFLOP/s"
    best = 0.0
    for size in (8192,) if device.type == "cuda" else (256, 1024):
        # Its own generator: the run's random state must not depend on how often the run was started.
        a = torch.randn(size, size, device=device, generator=torch.Generator(device)).to(dtype)
        times = _gemm_seconds(a)
        best = max(best, 2 * size**3 / min(times))
        if sum(times) > LONGEST_MEASUREMENT:  # a CPU without instructions for a dtype takes seconds for a large GEMM
            break
    return best, f"{best / 1e9:,.0f} GFLOP/s, this machine's {name} GEMM as measured at the start"


def _gemm_seconds(a: Tensor) -> list[float]:
    """The seconds of five GEMMs of a square matrix with itself, or of fewer if they are slow."""
    times: list[float] = []
    while len(times) < 5 and sum(times) <= LONGEST_MEASUREMENT:
        synchronize(a.device)
        start = time.perf_counter()
        a @ a
        synchronize(a.device)
        times.append(time.perf_counter() - start)
    return times


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far, of the GPU's allocator; on a CPU, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def busy_seconds() -> float:
    """Seconds this thread has run or waited for a core so far."""
    try:
        ran, ready, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(ran) + int(ready)) / 1e9
    except (OSError, ValueError):  # not Linux: its time in the run queue is unknown
        return time.thread_time()


@dataclass(frozen=True)
class Comparison:
    """Each rank's own seconds: per step on a CPU, for the probe GEMM on a GPU."""

    seconds: list[float]

    @property
    def slowest(self) -> int:
        """The rank that takes longest."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)

    @property
    def ratio(self) -> float:
        """The slowest rank's time divided by the median."""
        return max(self.seconds) / max(median(self.seconds), 1e-9)

    def sentence(self) -> str | None:
        """A sentence that names the slowest rank, if it is a straggler."""
        if self.ratio < STRAGGLER:
            return None
        return f"rank {self.slowest} computes {self.ratio:.2f} times as long as the median rank"


class Stragglers:
    """Compares the ranks' speed every `every` steps."""

    def __init__(self, every: int, device: torch.device, dtype: torch.dtype, world: int, rank: int) -> None:
        self.every = every if world > 1 else 0
        self.device, self.dtype, self.world, self.rank = device, dtype, world, rank
        self.last: tuple[int, float] | None = None
        self.comparisons: list[Comparison] = []

    def due(self, step: int) -> bool:
        """Whether it is time to compare."""
        return bool(self.every) and step % self.every == 0

    def compare(self, step: int) -> Comparison | None:
        """Compare the ranks over the steps since the last comparison, if one is due. Every rank must call this after every step."""
        if not self.due(step):
            return None
        if self.device.type == "cuda":
            own = median(_gemm_seconds(torch.ones(PROBE_SIZE, PROBE_SIZE, device=self.device, dtype=self.dtype)))
        else:
            before, self.last = self.last, (step, busy_seconds())
            if before is None:
                return None
            own = (self.last[1] - before[1]) / (step - before[0])
        seconds = torch.zeros(self.world, dtype=torch.float64, device=self.device)
        seconds[self.rank] = own
        dist.all_reduce(seconds)
        self.comparisons.append(Comparison(seconds.tolist()))
        return self.comparisons[-1]

    def summary(self) -> str | None:
        """A sentence about the rank that was slowest over all comparisons, if there was a straggler."""
        if not self.comparisons:
            return None
        columns = zip(*(c.seconds for c in self.comparisons), strict=True)
        return Comparison([median(column) for column in columns]).sentence()
