"""Reads a process's rank from its launcher's environment variables, and chooses the device and backend from them.

Launchers agree on little: torchrun sets everything, Slurm gives a machine's task count in a run-length code, OpenMPI sets no
address, and Kubernetes only an index. The number of ranks on this machine decides whether there is a GPU for each, and so whether
NCCL can be used. If a launcher binds each rank to its own GPUs, a rank sees fewer GPUs than the machine has ranks. All of this is
read from environment variables; the first machine's address of a Slurm job comes from `scontrol`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.run import Problem, Run, UserError, counted

NCCL, GLOO = "cpu:gloo,cuda:nccl", "gloo"


@dataclass(frozen=True)
class RankEnvironment:
    """A process's rank and world, as its launcher set them."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    local_world_size: int = 1
    has_agent: bool = False
    """Started by this package's own agent."""
    launcher: str = ""
    """The launcher's name, for display."""
    own_gpus: bool = False
    """The launcher gives each rank of a machine its own GPUs, so that seeing fewer GPUs than ranks is no problem."""


@dataclass(frozen=True)
class Placement:
    """A rank's device, and the backend of its collectives."""

    backend: str
    device: str

    def sentence(self, environment: RankEnvironment, gpu: str = "") -> str:
        """The placement in one line; `gpu` is the name of the device."""
        world, here = environment.world_size, environment.local_world_size
        machines = -(-world // max(1, here))
        backend = "nccl" if self.backend == NCCL else self.backend
        on = f"{gpu}, this rank on {self.device}" if gpu else self.device
        spread = f"{counted(world, 'rank')} on {counted(machines, 'machine')}"
        return f"backend {backend} on {on}; {spread}" + (f", started by {environment.launcher}" * (world > 1))


class _Variables:
    """Environment variables, where an empty one counts as not set."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def __contains__(self, name: str) -> bool:
        return bool(self.values.get(name))

    def text(self, *names: str) -> str:
        """The value of the first of these variables that is set, or ""."""
        return next((self.values[name] for name in names if name in self), "")

    def number(self, *names: str, otherwise: int = 0) -> int:
        """The value of the first of these variables that is set, as a number."""
        name = next((name for name in names if name in self), "")
        try:
            return int(self.values[name]) if name else otherwise
        except ValueError:
            reason = f'{name} is "{self.values[name]}" in the environment, and must be a whole number'
            raise UserError(reason) from None


def rank_environment(environment: Mapping[str, str], own_agent: bool = False) -> RankEnvironment | None:
    """Read the variables of torchrun, OpenMPI, Slurm or Kubernetes; None if this process was not started as a rank. With
    `own_agent` the machines of a run meet at `cluster.rendezvous` and each starts its own ranks. Then this process is a machine's
    command and not a rank, unless torchrun or such a command started it."""
    e = _Variables(environment)
    if own_agent and "SHARDWISE_AGENT" not in e and "TORCHELASTIC_RUN_ID" not in e:
        return None
    if "RANK" in e and "WORLD_SIZE" in e:
        return _torchrun(e)
    if "OMPI_COMM_WORLD_SIZE" in e or ("PMI_SIZE" in e and "MPI_LOCALNRANKS" in e):
        return _mpi(e)
    if "SLURM_PROCID" in e:
        return _slurm(e)
    return _kubernetes(e)


def _torchrun(e: _Variables) -> RankEnvironment:
    """The variables of torchrun. Other launchers set them too, some without the per-machine ones (LOCAL_RANK, LOCAL_WORLD_SIZE)."""
    world = e.number("WORLD_SIZE", otherwise=1)
    address = e.text("MASTER_ADDR") or "127.0.0.1"
    local_rank = e.number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    here = e.number("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    if not here and "SLURM_STEP_TASKS_PER_NODE" in e:
        here = _tasks_here(e)
    if not here:  # a local address: all ranks are here; otherwise at least those up to this local rank
        here = world if address in ("127.0.0.1", "localhost", "::1") else local_rank + 1
    command, elastic = "SHARDWISE_COMMAND" in e, "TORCHELASTIC_RUN_ID" in e
    launcher = "shardwise" if command else "torchrun" if elastic else "RANK and WORLD_SIZE in the environment"
    port, rank = e.number("MASTER_PORT", otherwise=29500), e.number("RANK")
    # Ranks of our command or of torchrun all inherit its environment; other launchers may give each rank its own GPU.
    own = not command and not elastic and _shown_gpus(e)
    return RankEnvironment(rank, world, local_rank, address, port, here, "SHARDWISE_AGENT" in e, launcher, own)


def _mpi(e: _Variables) -> RankEnvironment:
    """OpenMPI, or an MPI that starts processes with Hydra (MPICH, Intel MPI). They bind no GPUs, but scripts they start may."""
    world = e.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", otherwise=1)
    here = e.number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", otherwise=world)
    address = e.text("MASTER_ADDR") or ("127.0.0.1" if here >= world else "")
    if not address:
        raise UserError(
            "mpirun does not say where the ranks meet: start it with -x MASTER_ADDR=NAME of the first machine"
        )
    rank = e.number("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    local_rank = e.number("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    port = e.number("MASTER_PORT", otherwise=29500)
    return RankEnvironment(rank, world, local_rank, address, port, here, launcher="mpirun", own_gpus=_shown_gpus(e))


def _slurm(e: _Variables) -> RankEnvironment | None:
    """A task of `srun`. The script of `sbatch` has most of these variables too, but is not a rank."""
    in_step = any(name in e for name in ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"))
    world = e.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", otherwise=1)
    if world == 1 or (not in_step and e.text("ENVIRONMENT") == "BATCH"):
        return None
    here = _tasks_here(e)
    # Slurm allocated these GPUs to the job on this machine; a task may see all of them or only its own.
    given = e.number("SLURM_GPUS_ON_NODE")
    own = "SLURM_GPUS_PER_TASK" in e or "gpu" in e.text("SLURM_TRES_PER_TASK") or given >= here
    return RankEnvironment(
        e.number("SLURM_PROCID"),
        world,
        e.number("SLURM_LOCALID"),
        e.text("MASTER_ADDR") or first_host(e.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")),
        # Jobs on the same node need different ports.
        e.number("MASTER_PORT", otherwise=20000 + e.number("SLURM_JOB_ID") % 20000),
        here,
        launcher="srun",
        own_gpus=own,
    )


def _tasks_here(e: _Variables) -> int:
    """The number of tasks of a Slurm step on this machine, from a list such as `2(x3),1` with one number for each machine."""
    node = e.number("SLURM_NODEID")
    listed = e.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    world, nodes = e.number("SLURM_NTASKS", otherwise=1), e.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    each = -(-world // nodes) if nodes else e.number("SLURM_LOCALID") + 1
    return e.number("SLURM_NTASKS_PER_NODE", otherwise=each)


def _kubernetes(e: _Variables) -> RankEnvironment | None:
    """A pod that is one rank: in an indexed Job or JobSet that sets WORLD_SIZE and MASTER_ADDR, or in a Kubeflow TrainJob whose
    command is not torchrun. Pods do not share GPUs."""
    if "JOB_COMPLETION_INDEX" in e and "WORLD_SIZE" in e:
        rank, world = e.number("JOB_COMPLETION_INDEX"), e.number("WORLD_SIZE", otherwise=1)
        launcher, prefix = "a Job", ""
    elif "PET_NNODES" in e and "PET_NODE_RANK" in e:
        if e.text("PET_NNODES") == "1":  # all ranks are in this pod, and the command starts them
            return None
        if e.text("PET_NPROC_PER_NODE") not in ("", "1"):
            reason = (
                f"the TrainJob wants {e.text('PET_NPROC_PER_NODE')} ranks in each pod, which torchrun would start: let its "
                "command be torchrun -m shardwise train …, or add --cluster.rendezvous=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
            )
            raise UserError(reason)
        rank, world = e.number("PET_NODE_RANK"), e.number("PET_NNODES", otherwise=1)
        launcher, prefix = "a TrainJob", "PET_"
    else:
        return None
    address, port = e.text(f"{prefix}MASTER_ADDR"), e.number(f"{prefix}MASTER_PORT", otherwise=29500)
    if world == 1:
        return None
    if not address:
        raise UserError("the pods do not know where to meet: set MASTER_ADDR to the name of the first one")
    return RankEnvironment(rank, world, 0, address, port, 1, launcher=launcher)


def _shown_gpus(e: _Variables) -> bool:
    return any(name in e for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))


def first_host(nodes: str) -> str:
    """The first node name in a Slurm node list such as `gpu[003-007,9],login1`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if not found:
        raise UserError("Slurm gives no node list; set MASTER_ADDR to the name of the first node")
    return found[1] + (found[2] or "")


def slurm_address(node: str) -> str:
    """The address at which Slurm itself reaches a node, whose name the network may not resolve; the name if Slurm does not say."""
    try:
        said = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return node
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else node


def place(run: Run, environment: RankEnvironment, gpus: int, has_nccl: bool = True) -> Placement:
    """The device and backend of a rank that sees `gpus` GPUs. GPU collectives over gloo, which go through the host, are refused
    unless `train.backend` asks for them: such a job runs, but many times too slowly."""
    wanted, here, layout = run.train.backend, environment.local_world_size, run.layout
    if not gpus:
        if wanted == "nccl":
            raise UserError(Problem('"nccl" was asked for, but PyTorch sees no GPU here', "train.backend"))
        return Placement(GLOO, "cpu")
    shared = here > gpus and not environment.own_gpus
    device = f"cuda:{environment.local_rank % gpus}"
    if wanted == "gloo":
        if shared and (layout.pipeline > 1 or (layout.context > 1 and layout.context_method == "ring")):
            reason = (
                f"{here} ranks would share {counted(gpus, 'GPU')}, and gloo, their backend then, has no point-to-point "
                'operations on CUDA tensors; pipelines and ring attention need them. Use train.device = "cpu" or more GPUs'
            )
            raise UserError(Problem(reason, "layout"))
        return Placement(GLOO, device)
    if shared:
        reason = (
            f"{here} ranks of this machine see {counted(gpus, 'GPU')}, and NCCL needs one for each: give every rank a GPU (Slurm: "
            f'--gpus-per-node={here}), or let them share over gloo, which is slow, with train.backend = "gloo"'
        )
        raise UserError(Problem(reason, "train.backend"))
    if not has_nccl:
        reason = (
            'this PyTorch has no NCCL, and gloo is slow on GPUs; install one that has it, or set train.backend = "gloo"'
        )
        raise UserError(Problem(reason, "train.backend"))
    return Placement(NCCL, device)
