"""Gets the ranks of a run going: joins those that torchrun, Slurm or Kubernetes started, or starts them on this machine.

Started here, the parent watches: the first rank that fails takes the others down within seconds, and the user reads one message
that names it. Every rank's messages are kept in the run folder under `logs/`; the first rank also draws the display.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from shardwise.run import Problem, Run, UserError

GRACE = 3.0  # seconds that ranks have to end by themselves once one has failed


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that were started together."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int


def place(environment: Mapping[str, str]) -> Place | None:
    """What torchrun (also under Kubernetes) or Slurm say about this process; None when nobody started it as a rank."""
    e = environment
    if "RANK" in e and "WORLD_SIZE" in e:
        local = int(e.get("LOCAL_RANK", "0"))
        return Place(
            int(e["RANK"]),
            int(e["WORLD_SIZE"]),
            local,
            e.get("MASTER_ADDR", "127.0.0.1"),
            int(e.get("MASTER_PORT", "29500")),
        )
    if "SLURM_PROCID" in e and int(e.get("SLURM_NTASKS", "1")) > 1:
        address = e.get("MASTER_ADDR") or first_host(e.get("SLURM_STEP_NODELIST") or e.get("SLURM_JOB_NODELIST", ""))
        # Jobs that share a node must not share a port.
        port = int(e.get("MASTER_PORT") or 20000 + int(e.get("SLURM_JOB_ID", "0")) % 20000)
        return Place(int(e["SLURM_PROCID"]), int(e["SLURM_NTASKS"]), int(e.get("SLURM_LOCALID", "0")), address, port)
    return None


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list such as `gpu[003-007,9],login1`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if not found:
        raise UserError("Slurm gives no node list; set MASTER_ADDR to the name of the first node")
    return found[1] + (found[2] or "")


def check_world(run: Run, where: Place | None) -> None:
    """The ranks there are must be the ranks the layout needs."""
    needed = run.layout.world
    if where is not None and where.world != needed:
        sizes = " x ".join(
            f"{axis} {getattr(run.layout, axis)}" for axis in ("replicate", "shard", "context", "tensor", "pipeline")
        )
        raise UserError(Problem(f"needs {needed} ranks ({sizes}), but {where.world} were started", key="layout"))
    if where is None and run.cluster.nodes > 1:
        reason = f"{run.cluster.nodes} nodes: start the same command on each of them with torchrun or srun, {needed} ranks in all"
        raise UserError(Problem(reason, key="cluster.nodes"))


def join(where: Place, run: Run) -> None:
    """Become one of the ranks: choose a device and meet the others."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if run.train.device != "cpu" else 0
    shared = gpus > 0 and int(os.environ.get("LOCAL_WORLD_SIZE", where.world)) > gpus
    layout = run.layout
    if shared and (layout.pipeline > 1 or (layout.context > 1 and layout.context_method == "ring")):
        reason = (
            f"{layout.world} ranks would share {gpus} GPU(s), and gloo, which they then talk through, carries no point-to-point "
            'messages of GPUs; pipelines and ring attention need them. Use train.device = "cpu" or more GPUs'
        )
        raise UserError(Problem(reason, key="layout"))
    if gpus:
        torch.cuda.set_device(where.local_rank % gpus)
    dist.init_process_group(
        # NCCL wants a GPU for each rank; gloo carries collectives of CUDA tensors too, where ranks share one.
        "cpu:gloo,cuda:nccl" if gpus and not shared else "gloo",
        init_method=f"tcp://{where.address}:{where.port}",
        rank=where.rank,
        world_size=where.world,
        timeout=timedelta(minutes=10),
    )


def leave() -> None:
    """Part from the other ranks."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_local(arguments: Sequence[str], world: int, logs: Path) -> int:
    """Run `shardwise ARGUMENTS` as `world` ranks on this machine; gives the exit code, 0 when all ended well."""
    logs.mkdir(parents=True, exist_ok=True)
    port = free_port()
    cores = max(1, (os.cpu_count() or 1) // world)
    ranks = []
    for rank in range(world):
        environment = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(cores)),
        )
        log = (logs / f"rank-{rank}.log").open("wb")
        command = [sys.executable, "-m", "shardwise", *arguments]
        # Only the first rank speaks to the terminal; a group of its own lets a rank be ended with all it started.
        shown = None if rank == 0 else log
        ranks.append(subprocess.Popen(command, env=environment, stdout=shown, stderr=log, start_new_session=True))
        log.close()
    try:
        return _watch(ranks, logs)
    finally:
        _end(ranks)


def _watch(ranks: list[subprocess.Popen[bytes]], logs: Path) -> int:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            break
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)
    # Ranks that see their peer go fail soon after it; the first failure is the one to tell.
    _report(failed[0], ranks[failed[0]].returncode, logs)
    return 2 if ranks[failed[0]].returncode == 2 else 1


def _report(rank: int, code: int, logs: Path) -> None:
    path = logs / f"rank-{rank}.log"
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if code == 2:  # the user's mistake, already a sentence
        print("\n".join(line for line in lines if line.startswith("error: ")), file=sys.stderr)
        return
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = f": {lines[-1]}" if lines and code > 0 else ""
    print(f"error: rank {rank} {how}{last}\nthe other ranks were stopped; all they said is in {logs}", file=sys.stderr)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
