"""Stragglers: ranks whose own work takes longer than that of the others, so that all wait for them.

All ranks of a step take equally long, since they wait for each other; what tells them apart is the time they do not wait. On a CPU
that is the time the training thread ran or was ready to run, which Linux keeps account of: a slow core and a core shared with
others both show. On a GPU, kernels that compute and kernels that wait for other ranks can't be told apart without a profiler,
so every rank times one and the same matrix product between two steps: a throttled or shared GPU shows, a slow host does not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from shardwise.train.speed import synchronize

TELLING = 1.2
"""A rank that takes so many times the median is named."""
SIZE = 4096


def busy_seconds() -> float:
    """Seconds this thread has run or waited for a core so far."""
    try:
        ran, ready, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(ran) + int(ready)) / 1e9
    except (OSError, ValueError):  # not Linux: how long it was ready is not told
        return time.thread_time()


def probe_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """How long a fixed matrix product takes on this GPU now: the median of five."""
    a = torch.ones(SIZE, SIZE, device=device, dtype=dtype)
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times)


@dataclass(frozen=True)
class Comparison:
    """The ranks' own seconds: for one step on a CPU, for the probe on a GPU."""

    seconds: list[float]

    @property
    def slowest(self) -> int:
        """The rank that takes longest."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)

    @property
    def ratio(self) -> float:
        """Its time over the median rank's."""
        return max(self.seconds) / max(median(self.seconds), 1e-9)

    def sentence(self) -> str | None:
        """Names the slowest rank where that means something."""
        if self.ratio < TELLING:
            return None
        return f"rank {self.slowest} computes {self.ratio:.2f} times as long as the median rank"


class Stragglers:
    """Compares the ranks every so many steps."""

    def __init__(self, every: int, device: torch.device, dtype: torch.dtype, world: int, rank: int) -> None:
        self.every = every if world > 1 else 0
        self.device, self.dtype, self.world, self.rank = device, dtype, world, rank
        self.last: tuple[int, float] | None = None
        self.comparisons: list[Comparison] = []

    def due(self, step: int) -> bool:
        """Whether it is time to compare."""
        return bool(self.every) and step % self.every == 0

    def compare(self, step: int) -> Comparison | None:
        """The comparison of the steps since the last one, when it is time for it. Every rank must call it after every step."""
        if not self.due(step):
            return None
        if self.device.type == "cuda":
            own = probe_seconds(self.device, self.dtype)
        else:
            before, self.last = self.last, (step, busy_seconds())
            if before is None:
                return None
            own = (self.last[1] - before[1]) / (step - before[0])
        shares = torch.zeros(self.world, dtype=torch.float64, device=self.device)
        shares[self.rank] = own
        dist.all_reduce(shares)
        self.comparisons.append(Comparison(shares.tolist()))
        return self.comparisons[-1]

    def summary(self) -> str | None:
        """The rank that was slowest over all comparisons, where one was."""
        if not self.comparisons:
            return None
        columns = zip(*(c.seconds for c in self.comparisons), strict=True)
        return Comparison([median(column) for column in columns]).sentence()
