"""Every launcher's variables, as its processes have them, and the rank, device and backend that follow; GPUs are only counted."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from shardwise.run import Run, UserError, read_run
from shardwise.train.processes.environment import (
    GLOO,
    NCCL,
    RankEnvironment,
    first_host,
    place,
    rank_environment,
    slurm_address,
)
from shardwise.train.processes.launch import check_gpus

TORCHRUN = dict(
    RANK="11", WORLD_SIZE="16", LOCAL_RANK="3", LOCAL_WORLD_SIZE="8", MASTER_ADDR="node0", MASTER_PORT="1234"
) | dict(TORCHELASTIC_RUN_ID="none", GROUP_RANK="1")
# As Slurm 22.05 sets them: `srun` in a script with --nodes=2 --ntasks-per-node=8.
SLURM = dict(
    SLURM_JOB_ID="7", SLURM_PROCID="11", SLURM_LOCALID="3", SLURM_NODEID="1", SLURM_NTASKS="16", SLURM_STEP_ID="0",
    SLURM_STEP_NUM_TASKS="16", SLURM_STEP_NUM_NODES="2", SLURM_STEP_NODELIST="gpu[003-004]", SLURM_JOB_NODELIST="gpu[003-004]",
    SLURM_STEP_TASKS_PER_NODE="8(x2)", SLURM_NTASKS_PER_NODE="8", ENVIRONMENT="BATCH",
)  # fmt: skip
BATCH = {name: value for name, value in SLURM.items() if "STEP" not in name} | dict(SLURM_PROCID="0", SLURM_LOCALID="0")
OPENMPI = dict(
    OMPI_COMM_WORLD_RANK="11", OMPI_COMM_WORLD_SIZE="16", OMPI_COMM_WORLD_LOCAL_RANK="3", OMPI_COMM_WORLD_LOCAL_SIZE="8"
)
HYDRA = dict(PMI_RANK="11", PMI_SIZE="16", MPI_LOCALRANKID="3", MPI_LOCALNRANKS="8", MASTER_ADDR="a")
POD = dict(JOB_COMPLETION_INDEX="11", WORLD_SIZE="16", MASTER_ADDR="run-node-0-0.run", MASTER_PORT="29500")
KUBEFLOW = dict(
    PET_NNODES="16",
    PET_NODE_RANK="11",
    PET_NPROC_PER_NODE="1",
    PET_MASTER_ADDR="run-node-0-0.run",
    PET_MASTER_PORT="29400",
)


class Row(NamedTuple):
    """Variables and visible GPUs; then rank, world, local rank, local world, backend ("" where refused) and device."""

    environment: dict[str, str]
    gpus: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    backend: str
    device: str


ROWS = {
    "torchrun": Row(TORCHRUN, 8, 11, 16, 3, 8, NCCL, "cuda:3"),
    "torchrun, fewer GPUs": Row(TORCHRUN, 4, 11, 16, 3, 8, "", ""),
    "torchrun shown one GPU": Row(TORCHRUN | dict(CUDA_VISIBLE_DEVICES="0"), 1, 11, 16, 3, 8, "", ""),
    "torchrun on CPUs": Row(TORCHRUN, 0, 11, 16, 3, 8, GLOO, "cpu"),
    "torchrun of a TrainJob": Row(TORCHRUN | KUBEFLOW | dict(PET_NPROC_PER_NODE="8"), 8, 11, 16, 3, 8, NCCL, "cuda:3"),
    "srun": Row(SLURM, 8, 11, 16, 3, 8, NCCL, "cuda:3"),
    "srun --gpus-per-task=1": Row(SLURM | dict(SLURM_GPUS_PER_TASK="1"), 1, 11, 16, 3, 8, NCCL, "cuda:0"),
    "srun --tres-per-task": Row(SLURM | dict(SLURM_TRES_PER_TASK="cpu=4,gres/gpu=1"), 1, 11, 16, 3, 8, NCCL, "cuda:0"),
    "srun --gpu-bind=single:1": Row(SLURM | dict(SLURM_GPUS_ON_NODE="8"), 1, 11, 16, 3, 8, NCCL, "cuda:0"),
    "srun, GPUs shared": Row(SLURM | dict(SLURM_GPUS_ON_NODE="2"), 2, 11, 16, 3, 8, "", ""),
    "srun without GPUs": Row(SLURM, 0, 11, 16, 3, 8, GLOO, "cpu"),
    "srun, uneven": Row(
        SLURM | dict(SLURM_STEP_TASKS_PER_NODE="8,4(x2)", SLURM_NODEID="2"), 4, 11, 16, 3, 4, NCCL, "cuda:3"
    ),
    "srun --ntasks": Row(
        {k: v for k, v in SLURM.items() if "PER_NODE" not in k}, 8, 11, 16, 3, 8, NCCL, "cuda:3"
    ),
    "srun with RANK exported": Row(
        SLURM | dict(RANK="11", WORLD_SIZE="16", MASTER_ADDR="gpu003"), 8, 11, 16, 3, 8, NCCL, "cuda:3"
    ),
    "mpirun": Row(OPENMPI | dict(MASTER_ADDR="a"), 8, 11, 16, 3, 8, NCCL, "cuda:3"),
    "mpirun in a job of Slurm": Row(BATCH | OPENMPI | dict(MASTER_ADDR="a"), 8, 11, 16, 3, 8, NCCL, "cuda:3"),
    "mpirun, bound by a script": Row(
        OPENMPI | dict(MASTER_ADDR="a", CUDA_VISIBLE_DEVICES="3"), 1, 11, 16, 3, 8, NCCL, "cuda:0"
    ),
    "mpirun, GPUs shared": Row(OPENMPI | dict(MASTER_ADDR="a"), 1, 11, 16, 3, 8, "", ""),
    "mpiexec of MPICH": Row(HYDRA, 8, 11, 16, 3, 8, NCCL, "cuda:3"),
    "pods of one GPU": Row(POD, 1, 11, 16, 0, 1, NCCL, "cuda:0"),
    "PyTorchJob": Row(dict(RANK="11", WORLD_SIZE="16", MASTER_ADDR="m-0", MASTER_PORT="1"), 1, 11, 16, 0, 1, NCCL, "cuda:0"),
    "TrainJob of one GPU": Row(KUBEFLOW, 1, 11, 16, 0, 1, NCCL, "cuda:0"),
    "plain, on one machine": Row(dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1"), 2, 1, 2, 1, 2, NCCL, "cuda:1"),
    "plain, one GPU": Row(dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1"), 1, 1, 2, 1, 2, "", ""),
    "this command": Row(
        dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="0")
        | dict(SHARDWISE_COMMAND="a-1", SHARDWISE_AGENT="1"),
        1, 1, 2, 1, 2, "", "",
    ),
}  # fmt: skip


def run_of(world: int, *overrides: str) -> Run:
    return read_run(None, [f"layout.shard={world}", f"train.global_batch={world}", *overrides])


@pytest.mark.parametrize("name", ROWS)
def test_launchers(name: str) -> None:
    row = ROWS[name]
    found = rank_environment(row.environment)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == row[2:6]
    run = run_of(row.world)
    if row.backend:
        placed = place(run, found, row.gpus)
        assert (placed.backend, placed.device) == row[6:]
        return
    with pytest.raises(UserError, match=r'NCCL needs one for each: .* train.backend = "gloo"'):
        place(run, found, row.gpus)
    asked = place(run_of(row.world, "train.backend=gloo"), found, row.gpus)
    assert (asked.backend, asked.device) == (GLOO, f"cuda:{row.local_rank % row.gpus}")


def test_what_is_no_rank() -> None:
    assert rank_environment({}) is None
    assert rank_environment(dict(RANK="", WORLD_SIZE="")) is None
    assert rank_environment(BATCH) is None  # the script itself: it would wait for ranks that nobody starts
    assert rank_environment(SLURM | dict(SLURM_STEP_NUM_TASKS="1")) is None  # an interactive step
    assert rank_environment(dict(JOB_COMPLETION_INDEX="3")) is None
    # One command on each machine, which starts the ranks: only those are ranks.
    for started in (SLURM, POD, KUBEFLOW, OPENMPI):
        assert rank_environment(started, own_agent=True) is None
    assert rank_environment(SLURM | dict(RANK="1", WORLD_SIZE="2", SHARDWISE_AGENT="1"), own_agent=True) is not None
    assert rank_environment(TORCHRUN, own_agent=True) is not None


def test_where_ranks_meet() -> None:
    found = [rank_environment(e) for e in (TORCHRUN, SLURM, SLURM | dict(MASTER_ADDR="x", MASTER_PORT="9"), KUBEFLOW)]
    places = [("node0", 1234), ("gpu003", 20007), ("x", 9), ("run-node-0-0.run", 29400)]
    assert [(e.address, e.port) for e in found if e] == places
    assert [first_host(n) for n in ("a1,b2", "node12", "x[01,05]")] == ["a1", "node12", "x01"]
    assert slurm_address("no-such-machine") == "no-such-machine"


def test_what_is_missing_or_no_number_is_a_sentence() -> None:
    with pytest.raises(UserError, match='MASTER_PORT is "http" in the environment, and must be a whole number'):
        rank_environment(TORCHRUN | dict(MASTER_PORT="http"))
    with pytest.raises(UserError, match="-x MASTER_ADDR"):
        rank_environment(OPENMPI)
    with pytest.raises(UserError, match="torchrun -m shardwise train"):
        rank_environment(KUBEFLOW | dict(PET_NPROC_PER_NODE="8"))
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        rank_environment(POD | dict(MASTER_ADDR=""))


def test_what_a_backend_lacks_is_a_sentence() -> None:
    alone = RankEnvironment(0, 2, 0, "", 0, 2)
    with pytest.raises(UserError, match="this PyTorch has no NCCL"):
        place(run_of(2), alone, 2, has_nccl=False)
    with pytest.raises(UserError, match="sees no GPU here"):
        place(run_of(2, "train.backend=nccl"), alone, 0)
    with pytest.raises(UserError, match="no point-to-point"):
        place(read_run(None, ["layout.pipeline=2", "train.backend=gloo"]), alone, 1)


def test_the_choice_is_said_in_a_line() -> None:
    srun = rank_environment(SLURM)
    assert srun is not None
    said = place(run_of(16), srun, 8).sentence(srun, "NVIDIA H200")
    assert said == "backend nccl on NVIDIA H200, this rank on cuda:3; 16 ranks on 2 machines, started by srun"
    assert place(run_of(16), srun, 0).sentence(srun).startswith("backend gloo on cpu; 16 ranks on 2 machines")


def test_a_run_for_gpus_does_not_train_on_cpus_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match='"h100", and PyTorch sees no GPU here'):
        check_gpus(run_of(4, "cluster.chip=h100"))
    for allowed in (["cluster.chip=h100", "train.device=cpu"], ["cluster.chip=cpu"], []):
        check_gpus(run_of(4, *allowed))
