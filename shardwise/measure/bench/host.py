"""Measures transfers between a device and its host, and the host's own speed: GB/s from and to pinned memory, and GB/s of the
host's threads while they update optimizer states with the trainer's own code."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from shardwise.hardware import Profile
from shardwise.model.compute_copy import ComputeCopy
from shardwise.parallel.local_parameter import LocalParameter
from shardwise.plan.cost.host import MOMENTS
from shardwise.run.parameters import Parameter
from shardwise.train.optimizers.host_adamw import SLICE, HostAdamW, master_of

COPIED = 1 << 28
"""Bytes of a copy between device and host: enough to reach full speed."""
WRITTEN = 1 << 29
"""Bytes of the file used to measure a disk."""
UPDATED = 1 << 28
"""Elements of the parameters that are updated: far more than caches hold, and many slices per thread."""


def with_host(device: torch.device, profile: Profile, seconds: float, quick: bool = False) -> Profile:
    """The profile with the host's measurements added, taken in about `seconds`."""
    there, back = copy_gbs(device, seconds / 2) if device.type == "cuda" else (0.0, 0.0)
    updated = UPDATED // (64 if quick or device.type == "cpu" else 1)
    return replace(
        profile, to_host_gbs=there, to_device_gbs=back, host_update_gbs=update_gbs(device, updated, seconds / 2),
        disk_gbs=disk_gbs(Path.cwd(), WRITTEN // (16 if quick else 1)),
    )  # fmt: skip


def disk_gbs(folder: Path, size: int) -> float:
    """GB/s of a folder's disk: a file is written through to it, dropped from the page cache, and read back."""
    block = memoryview(bytes(range(256)) * 4096)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(len(block)):
            pass
        return 2 * size / (time.perf_counter() - start) / 1e9


def copy_gbs(device: torch.device, seconds: float) -> tuple[float, float]:
    """GB/s from a GPU to its host, and from the host to the GPU."""
    there, here = (
        torch.empty(COPIED, dtype=torch.uint8, device=device),
        torch.empty(COPIED, dtype=torch.uint8, pin_memory=True),
    )
    found = []
    for target, source in ((here, there), (there, here)):
        times: list[float] = []
        ends = time.perf_counter() + seconds / 2
        while len(times) < 3 or time.perf_counter() < ends:
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        found.append(COPIED / median(times) / 1e9)
    return found[0], found[1]


def update_gbs(device: torch.device, numel: int, seconds: float) -> float:
    """GB/s that the host reads and writes while it updates parameters whose 16-bit copies are on the device; bytes as the planner
    counts them."""
    rows = max(1, numel // SLICE)
    parameter = nn.Parameter(torch.zeros(rows, SLICE, device=device))
    copy = ComputeCopy(parameter, torch.bfloat16)
    parameter.data = parameter.data.to("cpu")
    held = LocalParameter(
        "layers.0.weight", parameter, Parameter("weight", (rows, SLICE), "ffn"), (), None, compute_copy=copy
    )
    master = master_of(held)
    groups = [dict(params=[master], weight_decay=0.1, rate=1.0, lr=1e-3)]
    optimizer = HostAdamW(groups, dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8), {master: held}, 1, 0)
    optimizer.factor = torch.ones(())
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < 4 or (time.perf_counter() < ends and len(times) < 50):
        copy.tensor.grad = None
        (copy.tensor * 1.0).sum().backward()
        optimizer.norms()
        start = time.perf_counter()
        optimizer.step()
        optimizer.finish()
        times.append(time.perf_counter() - start)
    moved = parameter.numel() * (MOMENTS * 4 + 2 * copy.tensor.itemsize)
    return moved / median(times[1:]) / 1e9  # the first allocates
