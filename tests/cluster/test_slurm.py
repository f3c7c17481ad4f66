"""A real Slurm of three machines on this one: jobs that `shardwise launch` wrote train on two of them, are preempted and requeued,
lose a machine, and end with the curve of an undisturbed run, bit for bit. `make cluster-test` runs this alone."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_toml

from shardwise.train.faults.ranks import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
MISSING = [name for name in NEEDED if not shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")]
pytestmark = [
    pytest.mark.large(
        "jobs of a real Slurm: requeue, preemption and a lost machine; the small tier has the script alone"
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed ({', '.join(MISSING)})"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a Slurm of several machines on one needs root"),
]

RUN = tiny_toml(
    dict(shard=2, replicate=2), steps=400, microbatch=1, checkpoint_every=20, restart_wait=1.0, hang_seconds=60.0
)


class Slurm:
    """The cluster, and commands with its configuration."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith("SLURM") and k not in ("RANK", "WORLD_SIZE")
        }
        self.environment |= dict(
            SLURM_CONF=str(folder / "slurm.conf"), SLURM_TEST_PORT=str(free_port()), OMP_NUM_THREADS="1"
        )
        self.environment["PATH"] += ":/usr/sbin"
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        (work / "run.toml").write_text(RUN)

    def machines(self, *words: str) -> str:
        """Start, lose or stop machines."""
        return self.call(str(HERE / "slurm.sh"), *words)

    def call(self, *command: str) -> str:
        """What a command prints."""
        done = subprocess.run(command, cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def launch(self, *words: str) -> str:
        """`shardwise launch` of the run."""
        return self.call(sys.executable, "-m", "shardwise", "launch", "run.toml", *words)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", number)))

    def wait(self, what: str, done: Callable[[], Any], seconds: float = 600) -> Any:
        """The first true answer."""
        deadline = time.monotonic() + seconds
        while not (found := done()):
            assert time.monotonic() < deadline, f"{what}: {self.call('squeue')}{self.said()}"
            time.sleep(0.1)
        return found

    def said(self) -> str:
        """The last lines of all jobs."""
        logs = self.work.glob("runs/*/logs/slurm-*.out")
        return "".join(f"\n{path}:\n" + "\n".join(path.read_text().splitlines()[-30:]) for path in logs)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), tmp_path_factory.mktemp("work"))
    try:
        cluster.machines("start", str(cluster.folder), "3")
        yield cluster
    finally:
        cluster.machines("stop", str(cluster.folder))


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """What must be the same to the bit, step by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for r in lines if "loss" in r]


def last_step(folder: Path) -> int:
    found = re.findall(r'"step": ?(\d+), "loss"', (folder / "metrics.jsonl").read_text()) if folder.exists() else []
    return int(found[-1]) if found else 0


def ended(slurm: Slurm, number: str) -> str:
    """The state of a job that is over, "" before."""
    state = slurm.job(number)["JobState"]
    return state if state not in ("RUNNING", "PENDING", "COMPLETING", "REQUEUED", "PREEMPTED") else ""


def test_a_disturbed_job_ends_with_the_curve_of_an_undisturbed_one(slurm: Slurm) -> None:
    options = ["--on", "slurm", "--nodes", "2", "--ranks-per-node", "2"]
    # As a user would by hand: the file, then sbatch.
    slurm.launch(*options, "--name=quiet", "--out", "quiet.sbatch")
    quiet = slurm.call("sbatch", "--parsable", "quiet.sbatch").strip()
    assert slurm.wait("the undisturbed job", lambda: ended(slurm, quiet)) == "COMPLETED", slurm.said()
    log = Path(slurm.job(quiet)["StdOut"])
    assert "backend gloo on cpu; 4 ranks on 2 machines, started by srun" in log.read_text()

    said = slurm.launch(*options, "--name=disturbed", "--submit")
    number = re.findall(r"submitted as (\d+)", said)[0]
    folder = slurm.work / "runs" / "disturbed"
    slurm.wait("60 steps", lambda: (folder / "metrics.jsonl").exists() and last_step(folder) >= 60)
    # A job of higher rank wants all machines: this one saves, goes back into the queue, and on when the other is done.
    urgent = slurm.call(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"
    )
    slurm.wait("the urgent job", lambda: ended(slurm, urgent.strip()))
    slurm.wait("the requeued job", lambda: slurm.job(number)["JobState"] == "RUNNING")
    assert slurm.job(number)["Restarts"] == "1"
    saved = max(int(path.name.partition("-")[2]) for path in (folder / "checkpoints").glob("step-*"))
    log = Path(slurm.job(number)["StdOut"])
    assert f"stop requested; saved step {saved}" in log.read_text()
    slurm.wait("more steps", lambda: last_step(folder) >= saved + 40)

    # A machine is gone, from one moment to the next, with its part of the ranks.
    machines = slurm.call("scontrol", "show", "hostnames", slurm.job(number)["NodeList"]).split()
    assert "lost" in slurm.machines("lose", str(slurm.folder), machines[1])
    slurm.wait("the job after the loss", lambda: int(slurm.job(number)["Restarts"]) >= 2)
    assert slurm.wait("the end", lambda: ended(slurm, number)) == "COMPLETED", slurm.said()
    assert machines[1] not in slurm.call("scontrol", "show", "hostnames", slurm.job(number)["NodeList"]).split()
    assert "completed" in slurm.launch("--name=disturbed", "--status")
    assert "goodput" in slurm.launch("--name=disturbed", "--logs")
    slurm.machines("bring", str(slurm.folder), machines[1])

    quiet_curve, disturbed_curve = curve(slurm.work / "runs" / "quiet"), curve(folder)
    assert [step for step, *_ in disturbed_curve] == list(range(1, 401))
    assert disturbed_curve == quiet_curve


def test_ahead_of_the_time_limit_a_job_saves_and_comes_back_and_a_cancelled_one_does_not(slurm: Slurm) -> None:
    # The limit of a job cannot be under a minute, so its signal is sent by hand, as Slurm would.
    options = ["--on", "slurm", "--nodes", "1", "--ranks-per-node", "4", "--train.steps=100000"]
    number = re.findall(r"submitted as (\d+)", slurm.launch(*options, "--name=signalled", "--submit"))[0]
    folder = slurm.work / "runs" / "signalled"
    slurm.wait("steps", lambda: (folder / "metrics.jsonl").exists() and last_step(folder) >= 5)
    slurm.call("scancel", "--signal=USR1", number)
    slurm.wait(
        "the requeue", lambda: slurm.job(number)["Restarts"] == "1" and slurm.job(number)["JobState"] == "RUNNING"
    )
    log = Path(slurm.job(number)["StdOut"])
    slurm.wait("the resumed run", lambda: "going on from step" in log.read_text())
    assert "running" in slurm.launch("--name=signalled", "--status")
    # Ranks that are cancelled save as well, and end with the same exit code; but nobody wants the job back.
    before = last_step(folder)
    slurm.wait("more steps", lambda: last_step(folder) > before)
    slurm.launch("--name=signalled", "--cancel")
    slurm.wait("its end", lambda: ended(slurm, number))
    time.sleep(3)
    assert slurm.job(number)["JobState"] == "CANCELLED"
    assert slurm.job(number)["Restarts"] == "1"


def made(folder: Path) -> dict[str, bytes]:
    """What a preparation wrote, without what is about its jobs."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("plan.json", "data.toml"))
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in files
    }  # without the two that name the folder
    return {name: data for name, data in found.items() if not name.startswith(("launch/", "logs/"))}


def test_a_corpus_is_prepared_by_arrays_as_by_one_process(slurm: Slurm) -> None:
    """Every stage is an array of three tasks, each after the one before; two of the files hold the same texts, nearly."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        source = random.Random(seed)
        texts = [" ".join("".join(source.choices("abcdefgh", k=4)) for _ in range(80)) for _ in range(200)]
        lines = [json.dumps({"text": f"{text} {name if n % 2 else ''}"}) for n, text in enumerate(texts)]
        (slurm.work / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    steps = "".join(f'[[steps]]\nkind = "{kind}"\n' for kind in ("exact", "minhash"))
    paths = '["a.jsonl", "b.jsonl", "c.jsonl"]'
    (slurm.work / "recipe.toml").write_text(f'[[sources]]\nname = "web"\npaths = {paths}\n{steps}')
    prepare = [sys.executable, "-m", "shardwise", "data", "prepare", "recipe.toml"]
    slurm.call(*prepare, "--out", "local", "--workers", "1")
    command = [*prepare, "--out", "arrays", "--executor", "slurm", "--workers", "3", "--json"]
    jobs = json.loads(slurm.call(*command))["jobs"]
    assert len(jobs) > 3
    for number in jobs:
        state = slurm.wait(f"job {number}", lambda number=number: ended(slurm, str(number)), 300)  # type: ignore[misc]
        assert state == "COMPLETED", slurm.said()
    assert made(slurm.work / "arrays") == made(slurm.work / "local")
    kept = sum(path.read_text().count("\n") for path in (slurm.work / "arrays" / "documents").glob("*.jsonl"))
    assert kept == 400  # of a and b each text once, of c all
    assert json.loads(slurm.call(*command)) == {"jobs": []}
