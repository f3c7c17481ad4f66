"""Checks this machine: what works, what will fail, and how to fix it. Looks at Python, PyTorch, GPUs, limits, disk and clock.

A finding is `good`, a `note` (something will be slower, or an option is missing) or `bad` (the thing named will fail).
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.run.problems import EXTRA_OF, install

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, TESTED_TORCH = (2, 11), (2, 13)
NEEDED_BY = {
    "train": "train, profile, verify, generate, eval, convert, quantize, bench", "parquet": "data of Parquet, and trace",
    "trace": "trace", "workbench": "workbench, watch and serve", "serve": "serve, load", "chat": "chat templates",
    "tensorboard": "train.tensorboard", "wandb": "train.wandb",
}  # fmt: skip
GIB = 2**30
WRITTEN = 32 * 2**20
"""Bytes written to measure the speed of a disk."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    topic: str
    name: str
    value: str
    state: str = "good"
    mend: str = ""
    """How to fix it if it is not good."""


def examine(versions: dict[str, str], built_for: str, folder: Path) -> list[Finding]:
    """Run every check; `versions` are those of the packages, "" for one that is not installed."""
    found = [*_python(), *_packages(versions)]
    if versions["torch"]:
        found += [*_torch(versions["torch"], built_for), *_gpus(built_for)]
    return [*found, *_limits(), *_disk(folder), *_clock(), *_network()]


def _python() -> Iterator[Finding]:
    old = sys.version_info < OLDEST_PYTHON
    yield Finding(
        "python", "version", platform.python_version(), "bad" if old else "good",
        f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or later" * old,
    )  # fmt: skip
    yield Finding("python", "system", f"{platform.system()} {platform.release()} {platform.machine()}")


def _packages(versions: dict[str, str]) -> Iterator[Finding]:
    for name, version in versions.items():
        if version:
            yield Finding("packages", name, version)
        elif name in EXTRA_OF:
            extra = EXTRA_OF[name]
            yield Finding("packages", name, "not installed", "note", f"for {NEEDED_BY[extra]}: {install(extra)}")


def _torch(version: str, built_for: str) -> Iterator[Finding]:
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    state = "bad" if number < OLDEST_TORCH else "note" if number > TESTED_TORCH else "good"
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST_TORCH, TESTED_TORCH))
    mend = {"bad": f"training needs {oldest} or later", "note": f"tested with {oldest} to {newest}", "good": ""}[state]
    yield Finding("torch", "version", f"{version} for {built_for}", state, mend)
    import torch
    import torch.distributed as dist

    yield Finding("torch", "threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores")
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding("torch", "gloo", *(("available",) if gloo else ("not built in", "bad", "several CPU ranks need it")))
    if torch.cuda.is_available():
        nccl = dist.is_nccl_available()
        said = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not built in"
        yield Finding("torch", "NCCL", said, "good" if nccl else "bad", "" if nccl else "several GPU ranks need it")
        yield Finding("torch", "cuDNN", str(torch.backends.cudnn.version()))
        kernels = {"flash": torch.backends.cuda.flash_sdp_enabled(), "cuDNN": torch.backends.cuda.cudnn_sdp_enabled()}
        yield Finding("torch", "attention", ", ".join(name for name, on in kernels.items() if on) or "math alone")
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), "")
    missing = "compiled layers (train.compile) and Triton's kernels need one: install gcc"
    yield Finding(
        "torch", "C compiler", compiler or "none", "good" if compiler else "note", "" if compiler else missing
    )


def _gpus(built_for: str) -> Iterator[Finding]:
    import torch

    from shardwise.hardware.chips import chip_of_driver_name

    cards = _nvidia_smi()
    if not torch.cuda.is_available():
        said, mend = "cannot use", "check the driver's version and CUDA_VISIBLE_DEVICES"
        if built_for == "CPUs":
            said, mend = "does not see", "this PyTorch is built for CPUs alone: install one that is built for CUDA"
        if cards:
            yield Finding("gpus", "CUDA", f"{len(cards)} GPUs that PyTorch {said}", "bad", mend)
        else:
            yield Finding("gpus", "CUDA", "none", "note", "runs use CPUs, over gloo")
        return
    for number in range(torch.cuda.device_count()):
        name, (free, total) = torch.cuda.get_device_name(number), torch.cuda.mem_get_info(number)
        chip = chip_of_driver_name(name)
        known = f"planned as {chip.name}" if chip else "not in the catalogue"
        value = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, {known}"
        mend = "" if chip else "`shardwise bench` measures it; cluster.profile uses that, or a TOML file describes it"
        if free < 0.9 * total:
            mend = "another process holds memory: nvidia-smi lists it"
        yield Finding("gpus", f"GPU {number}", value, "note" if mend else "good", mend)
    yield from _gpu_clocks(cards)


SMI = ("index", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.limit", "power.max_limit",
       "clocks_throttle_reasons.hw_slowdown", "ecc.errors.uncorrected.volatile.total")  # fmt: skip


def _nvidia_smi() -> list[list[str]]:
    """The driver's report on each card; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.strip()]


def _gpu_clocks(cards: list[list[str]]) -> Iterator[Finding]:
    for card in cards:
        if len(card) != len(SMI):
            continue
        index, clock, most, heat, limit, most_limit, slowed, errors = card
        what, value, state, mend = "clock", f"{clock} of {most} MHz, {heat} °C, limited to {limit} W", "good", ""
        if slowed == "Active":
            state, mend = "bad", "the card slows itself down: look at its cooling and its power"
        elif errors.isdigit() and int(errors):
            what, value, state = "memory", f"{errors} uncorrected errors", "bad"
            mend = "reset the card, or have it replaced"
        elif _number(limit) < 0.99 * _number(most_limit):
            state = "note"
            mend = f"it could draw {most_limit} W: nvidia-smi -pl {most_limit}; or tell the plan, cluster.power_w = {limit}"
        yield Finding("gpus", f"GPU {index} {what}", value, state, mend)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < 4096
    yield Finding("limits", "open files", f"{files:,}" if files >= 0 else "unlimited", "note" if few else "good",
                  "servers and jobs of many ranks need more: ulimit -n 65536" * few)  # fmt: skip
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    bounded = locked not in (-1, resource.RLIM_INFINITY) and locked < GIB
    yield Finding("limits", "locked memory", f"{locked / GIB:.2f} GiB" if bounded else "enough", "note" if bounded else "good",
                  "InfiniBand needs it unlimited: ulimit -l unlimited" * bounded)  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("limits", "memory", f"{memory / GIB:.1f} GiB")
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        small = shared < GIB
        yield Finding("limits", "shared memory", f"{shared / GIB:.2f} GiB", "note" if small else "good",
                      "NCCL and workers share memory there: in a container, --shm-size=8g or --ipc=host" * small)  # fmt: skip


def _disk(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    full = free < GIB
    yield Finding("disk", "free", f"{free / GIB:.1f} GiB in {folder}", "bad" if full else "good",
                  "checkpoints will not fit: free some, or give --out another disk" * full)  # fmt: skip
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            file.write(os.urandom(WRITTEN))
            file.flush()
            os.fsync(file.fileno())
            speed = WRITTEN / (time.perf_counter() - began)
        yield Finding("disk", "write", f"{speed / 1e9:.2f} GB/s, the plan's cluster.storage_gbs")
    except OSError as e:
        yield Finding("disk", "write", e.strerror or str(e), "bad", f"runs are written to {folder}: give --out another")


def _clock() -> Iterator[Finding]:
    program = shutil.which("timedatectl")
    said = ""
    if program is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [program, "show", "-p", "NTPSynchronized", "--value"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    value = {"yes": "synchronised", "no": "not synchronised"}.get(said, "not known to be synchronised")
    mend = "logs of several machines will not line up: run chrony or ntpd"
    yield Finding("clock", "NTP", value, "good" if said == "yes" else "note", "" if said == "yes" else mend)


def _network() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        yield Finding("network", "host name", f"{name} is {address}")
    except OSError:
        mend = f"ranks of several machines meet by name: put {name} into /etc/hosts or the DNS"
        yield Finding("network", "host name", f"{name} is not known", "note", mend)


def as_json(findings: list[Finding], versions: dict[str, str]) -> dict[str, Any]:
    """The findings as JSON data."""
    return {
        "good": not any(each.state == "bad" for each in findings),
        "versions": versions,
        "findings": [vars(each) for each in findings],
    }
