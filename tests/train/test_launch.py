"""Ranks started by the command itself: the curve of one process, one message when a rank dies, and joining other launchers."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import HANG_SECONDS
from tiny_run import tiny_run, tiny_toml

from shardwise.model.device import choose_device
from shardwise.run import UserError, read_run
from shardwise.train.faults.heartbeat import Heartbeat, read_heartbeat
from shardwise.train.faults.ranks import _die_with_command, environment_of, threads_of
from shardwise.train.loop import train
from shardwise.train.processes.environment import RankEnvironment
from shardwise.train.processes.launch import check_here, chip_here, join
from shardwise.train.progress.metrics import read_metrics

KEYS = dict(steps=4, microbatch=1, dtype="float64", eval_every=2, eval_sequences=3)


def shardwise(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "r.toml").write_text(tiny_toml(**KEYS))
    command = [sys.executable, "-m", "shardwise", "train", "r.toml", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that the command has started."""
    folder = tmp_path_factory.mktemp("several")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1,2")  # which OpenMP takes, and PyTorch must not be told
        process = shardwise(folder, "--out", "several", "--layout.tensor=2")
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, out + err
    return folder


@pytest.mark.drawn(group="commands")
def test_the_command_starts_its_ranks_and_the_curve_is_that_of_one(several: Path) -> None:
    train(tiny_run(**KEYS), several / "alone")
    for log in (several / "several" / "logs").glob("rank-*.log"):
        assert "Warning" not in log.read_text()  # such as those of PyTorch's own future
    a, b = read_metrics(several / "alone"), read_metrics(several / "several")
    for one, other in zip(a, b, strict=True):
        assert one["step"] == other["step"]
        for key in ("loss", "grad_norm", "eval_loss", "tokens"):
            assert one.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-9)


@pytest.mark.large("that ranks started by the command go on with another layout; other ranks do in tests/checkpoint")
def test_it_goes_on_with_another_layout(several: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    more = shardwise(several, "--out", "several", "--layout.pipeline=2", "--train.steps=5")
    out, err = more.communicate(timeout=HANG_SECONDS)
    assert more.returncode == 0, out + err
    assert "going on from step 4" in out
    assert read_metrics(several / "several")[-2]["step"] == 5


def heartbeats(folder: Path, world: int) -> list[Heartbeat]:
    """The heartbeats of all ranks, when each has given one."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        found = [beat for rank in range(world) if (beat := read_heartbeat(folder / "logs", rank)) is not None]
        if len(found) == world:
            return found
    raise AssertionError(f"no heartbeats in {folder}")


def until_steps(process: subprocess.Popen[str], said: str = "step ") -> None:
    """Wait until the run says that it trains."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(said):
            return


@pytest.mark.drawn(group="commands")
def test_a_rank_that_dies_takes_the_others_down_with_one_message(tmp_path: Path) -> None:
    process = shardwise(
        tmp_path,
        "--out=out",
        "--layout.shard=3",
        "--train.global_batch=3",
        "--train.steps=100000",
        "--train.restarts=0",
    )
    until_steps(process)
    ranks = [beat.process for beat in heartbeats(tmp_path / "out", 3)]
    os.kill(ranks[1], signal.SIGKILL)
    # Its end is seen, and not that it does nothing, which would take `train.hang_seconds`, ten minutes.
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert "error: rank 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread does it, which stops as well")
def test_a_rank_dies_with_its_command_even_while_it_is_stopped() -> None:
    lifeline, held_by_the_command = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        held_by_the_command.close()
        os.setsid()
        _die_with_command(lifeline)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    held_by_the_command.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.drawn(group="commands")
def test_a_mistake_that_a_rank_finds_is_one_sentence_and_no_restart(tmp_path: Path) -> None:
    process = shardwise(tmp_path, "--out=out", "--layout.shard=2", "--train.lr=1e200", "--train.clip=0")
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 2
    assert re.fullmatch(r"error: step \d: the (loss|gradient norm) is (nan|inf); train\.guard = .*\n", err), err


def test_threads_are_what_openmp_makes_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    for value in ("", " ", "many", "0", "-4", "4,", "4,0", "4.5", str(1 << 40)):  # like none: the cores are shared
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert environment_of(0, 0, 4, 4, "", 1)["OMP_NUM_THREADS"] == "3", value
    for value, threads in (("5", 5), (" 5 ", 5), ("4,2", 4), ("1, 8", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert threads_of(environment_of(0, 0, 4, 4, "", 1)["OMP_NUM_THREADS"]) == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert environment_of(0, 0, 4, 4, "", 1)["OMP_NUM_THREADS"] == "3"


def test_a_layout_that_cannot_work_starts_nothing(tmp_path: Path) -> None:
    process = shardwise(tmp_path, "--layout.tensor=3", "--layout.pipeline=5", "--layout.shard=3")
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 2
    assert len(err.splitlines()) >= 3
    assert all(line.startswith("error: ") for line in err.splitlines())
    assert not (tmp_path / "runs").exists()


def test_the_ranks_there_are_must_be_those_the_layout_needs() -> None:
    run = read_run(None, ["layout.shard=4"])
    check_here(run, RankEnvironment(0, 4, 0, "", 0))
    check_here(run, None)
    with pytest.raises(UserError, match=r"needs 4 ranks .* but 3 were started"):
        check_here(run, RankEnvironment(0, 3, 0, "", 0))
    with pytest.raises(UserError, match="torchrun or srun"):
        check_here(read_run(None, ["layout.shard=4", "cluster.nodes=2"]), None)


@pytest.mark.parametrize("begins", ["join", "chip_here", "choose_device"])
def test_memory_of_gpus_is_set_up_before_one_is_used(monkeypatch: pytest.MonkeyPatch, begins: str) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is as before behind the test
        monkeypatch.delenv(name)
    used: list[str | None] = []

    def use(*_: object) -> None:
        used.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", use)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: use() or "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.current_device", lambda: use() or 0)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    if begins == "join":
        join(RankEnvironment(0, 1, 0, "127.0.0.1", 0), tiny_run(device="auto"))
    elif begins == "chip_here":
        assert chip_here(tiny_run(device="auto")) == "h200-sxm"
    else:
        choose_device("auto")
    assert used == ["expandable_segments:True"]


def test_what_needs_a_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(None, ["layout.offload=true", "train.cuda_graph=false"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=r"layout\.offload: there is no GPU here: keeps a GPU's state in CPU memory"):
        check_here(run, None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_here(run, None)
