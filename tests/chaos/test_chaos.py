"""The faults of a campaign (what they come to: `test_every_fault.py`), and machines that leave a run: it goes on with those that
stay, on a layout planned for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from campaign import KINDS, ROOT, RUN, losses, plan_faults
from patience import HANG_SECONDS

from shardwise.run import read_run
from shardwise.train.faults.ranks import free_port
from shardwise.train.loop import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")


def test_faults_are_a_function_of_the_seed_and_visit_every_operation_of_a_save() -> None:
    operations = {0: 23, 1: 8}
    assert plan_faults(KINDS, 60, 2, 3, operations) == plan_faults(KINDS, 60, 2, 3, operations)
    crashes = plan_faults({"crash while saving": 1}, 80, 2, 3, operations)
    assert {(f["rank"], f["operation"]) for f in crashes} == {
        (r, n) for r, most in operations.items() for n in range(1, most + 1)
    }


def machine(folder: Path, port: int, *more: str) -> subprocess.Popen[str]:
    """One of two machines of a run of four ranks."""
    (folder / "run.toml").write_text(RUN)
    keys = [
        "--layout.shard=4",
        "--cluster.nodes=2",
        f"--cluster.rendezvous=127.0.0.1:{port}",
        "--cluster.node_wait=1",
    ]
    keys += [
        "--train.elastic=true",
        "--train.checkpoint_every=5",
        "--train.hang_seconds=60",
        "--train.dtype=float64",
        *more,
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "shardwise", "train", "run.toml", "--out", "out", *keys]
    with (folder / "said").open("a") as said:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, text=True)


@pytest.mark.drawn(group="commands")
def test_with_fewer_machines_a_run_goes_on_with_another_layout(tmp_path: Path) -> None:
    port, steps = free_port(), 40
    stays = machine(tmp_path, port, f"--train.steps={steps}")
    leaves = machine(tmp_path, port, f"--train.steps={steps}")
    deadline = time.monotonic() + HANG_SECONDS

    def until(there: Path) -> None:
        while not there.exists():
            assert stays.poll() is None
            assert leaves.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    # Which of the two holds the meeting point is a matter of who came first; the other may leave.
    until(tmp_path / "out" / "logs")
    gone, left = (leaves, stays) if _listener(port) == stays.pid else (stays, leaves)
    until(tmp_path / "out" / "checkpoints" / "step-00000005")
    gone.send_signal(signal.SIGKILL)
    gone.wait()
    assert left.wait(HANG_SECONDS) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert "2 of 4 ranks are here; going on with " in said, said
    run = read_run(tmp_path / "run.toml", [f"train.steps={steps}", "train.dtype=float64"])
    train(run, tmp_path / "alone" / "out")
    for one, other in zip(losses(tmp_path), losses(tmp_path / "alone"), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def _listener(port: int) -> int:
    """The process that listens on a port of this machine."""
    sockets = {
        line.split()[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    }
    for process in Path("/proc").glob("[0-9]*"):
        try:
            handles = {os.readlink(handle) for handle in (process / "fd").iterdir()}
        except OSError:
            continue
        if handles & {f"socket:[{inode}]" for inode in sockets}:
            return int(process.name)
    raise AssertionError(f"nobody listens on {port}")
