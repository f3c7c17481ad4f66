"""How fast and how full: the peak a utilisation is taken of, and the memory in use."""

from __future__ import annotations

import resource
import sys
import time

import torch

from shardwise.hardware.chips import chip_of_driver_name

LONGEST_MEASUREMENT = 0.2  # seconds


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s to measure a run against, and where that number is from: the maker's figure for a known GPU, otherwise the
    best of a few matrix products timed here."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        chip = chip_of_driver_name(torch.cuda.get_device_name(device))
        if chip is not None and name in chip.peak:
            return chip.peak[name], f"{chip.name}'s {name} peak of {chip.peak[name] / 1e12:,.0f} TFLOP/s"
    best, spent = 0.0, 0.0
    for size in (8192,) * 5 if device.type == "cuda" else (256, 512, 1024, 1024, 1024):
        # Its own generator: a run's must not depend on how often it was started.
        a = torch.randn(size, size, device=device, generator=torch.Generator(device)).to(dtype)
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        taken = time.perf_counter() - start
        best, spent = max(best, 2 * size**3 / taken), spent + taken
        if spent > LONGEST_MEASUREMENT:  # a CPU without instructions for a dtype takes a minute for a large product
            break
    flops = best
    return flops, f"{flops / 1e9:,.0f} GFLOP/s, this machine's {name} matrix product as measured at the start"


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
