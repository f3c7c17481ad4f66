"""What `shardwise launch` writes: the script of Slurm, run with commands that only note how they were called; the objects of
Kubernetes, held against their published schemas; the lines of torchrun; and what was submitted, followed and cancelled."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_SECONDS

from shardwise.cli.main import main
from shardwise.launch.job import estimate, parse_time, requeues, scheduler_name, time_text
from shardwise.launch.slurm import array_script
from shardwise.launch.submission import submissions
from shardwise.run import UserError, read_run

HERE = Path(__file__).parent
LARGE = HERE.parents[1] / "examples" / "llama3-70b-h100.toml"
SMALL = """
[model]
layers = 2
hidden = 16
heads = 2
[layout]
shard = 4
[train]
steps = 10
global_batch = 4
seq_len = 32
device = "cpu"
restarts = 1
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small run in it, to launch from."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def launch(*words: str, run: str = "small.toml") -> int:
    return main(["launch", run, *words])


def command(folder: Path, name: str, body: str) -> None:
    """A program that notes how it was called, then does what it is told."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{body}\n')
    path.chmod(0o755)


TWO_BY_TWO = ("--nodes", "2", "--ranks-per-node", "2")


def test_a_large_run_asks_for_what_its_plan_needs(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--on", "slurm", "--out", "job", run=str(LARGE)) == 0
    script = (work / "job").read_text()
    asked = [line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    found = estimate(read_run(LARGE))
    assert found is not None
    assert asked[1:4] == ["--nodes=64", "--ntasks-per-node=8", "--gpus-per-node=8"]
    assert f"--time={time_text(found.limit)}" in asked
    assert {"--requeue", "--open-mode=append", "--signal=USR1@210"} < set(asked)
    # The slow end of the plan's interval, with a margin, and no more than twice what is expected.
    assert 1.1 * found.expected < found.limit < 2 * found.expected
    said = capsys.readouterr().out
    assert "64 machines x 8 h100" in said
    assert "time limit: " in said
    # A shorter limit is a job that comes back.
    assert launch("--on", "slurm", "--time", "2-00:00:00", "--json", run=str(LARGE)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["time_limit_seconds"] == 172800
    assert answer["file"] == str(work / "runs" / "llama3-70b-h100" / "launch" / "job.sbatch")
    assert any("it will be requeued about" in note for note in answer["notes"])
    assert any("train.checkpoint_every is 0" in note for note in answer["notes"])


def test_a_run_that_does_not_fit_is_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        launch("--on", "slurm", "--out", "job", "--layout.recompute=none", "--train.microbatch=8", run=str(LARGE)) == 2
    )
    said = capsys.readouterr().err
    assert said.startswith("error: layout: ")
    assert "does not fit (memory: pipeline rank 0 needs" in said
    assert not (work / "job").exists()
    assert launch("--on", "slurm", "--out", "job", "--train.microbatch=8", "--anyway", run=str(LARGE)) == 0
    assert capsys.readouterr().err.startswith("warning: layout: ")


def run_script(work: Path, codes: list[int], state: str = "RUNNING", saves: bool = False) -> tuple[int, list[str]]:
    """The exit code of the script of a job whose steps end with these codes, and what it called."""
    programs = work / "programs"
    shutil.rmtree(programs, ignore_errors=True)
    cases = " ".join(f"{n}) exit {code};;" for n, code in enumerate(codes, 1))
    save = 'mkdir -p "$PWD/runs/small/checkpoints/step-0000000$n"' if saves else ""
    command(programs, "srun", f'n=$(grep -c ^srun "{programs}/calls")\n{save}\ncase $n in {cases} esac\nexit 0')
    command(programs, "squeue", f"echo {state}")
    command(
        programs,
        "scontrol",
        'case "$1 $2" in "show hostnames") echo n1;; "show node") echo "NodeAddr=10.0.0.1 x";; esac',
    )
    command(programs, "sleep", "")
    environment = os.environ | dict(
        PATH=f"{programs}:{os.environ['PATH']}", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]"
    )
    done = subprocess.run(
        ["bash", "job"], cwd=work, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    return done.returncode, [line for line in (programs / "calls").read_text().splitlines() if "show" not in line]


def test_the_script_goes_on_after_a_stop_and_starts_again_after_a_failure(work: Path) -> None:
    assert launch("--on", "slurm", "--out", "job", *TWO_BY_TWO, "--env", "NOTE=a b", "--option=--partition=gpu") == 0
    script = (work / "job").read_text()
    assert "#SBATCH --partition=gpu\n" in script
    assert "export NOTE='a b'\n" in script
    assert "--gpus-per-node" not in script
    code, calls = run_script(work, [0])
    assert (code, len(calls)) == (0, 1)
    ranks = f"train {work}/small.toml --out {work}/runs/small --cluster.nodes=2 --cluster.devices_per_node=2"
    assert calls[0].endswith(ranks)
    code, calls = run_script(work, [75])
    assert (code, calls[-1]) == (75, "scontrol requeue 7")
    # What Slurm ends by itself, it also requeues by itself, or not.
    code, calls = run_script(work, [75], state="COMPLETING")
    assert (code, len(calls)) == (75, 2)
    assert run_script(work, [2])[0] == 2
    # One restart without a new checkpoint, or as many as there are new ones.
    code, calls = run_script(work, [137, 0])
    assert (code, [call.split()[0] for call in calls]) == (0, ["srun", "sleep", "srun"])
    assert run_script(work, [137, 1, 0])[0] == 1
    assert run_script(work, [137, 1, 1, 1, 0], saves=True)[0] == 0


def test_folders_with_spaces_reach_sbatch_whole(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sbatch splits the words of a directive as a shell does, quotes included."""
    folder = work / "my runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert launch("--on", "slurm", "--out", "job", run="../small.toml") == 0
    for script, wanted in (
        ((folder / "job").read_text(), [f"--chdir={folder}", f"--output={folder}/runs/small/logs/slurm-%j.out"]),
        (array_script("ladder", 2, ["true"], folder), [f"--output={folder}/logs/slurm-%A-%a.out"]),
    ):
        lines = [shlex.split(line) for line in script.splitlines() if line.startswith("#SBATCH ")]
        assert [len(words) for words in lines] == [2] * len(lines)
        assert [word for _, word in lines if word.startswith(("--chdir", "--output"))] == wanted


def test_the_wait_before_a_restart_doubles_six_times_at_most(work: Path) -> None:
    assert launch("--on", "slurm", "--out", "job", *TWO_BY_TWO, "--train.restarts=10", "--train.restart_wait=2") == 0
    code, calls = run_script(work, [1] * 10)
    waits = [int(call.split()[1]) for call in calls if call.startswith("sleep")]
    assert (code, waits) == (0, [2, 4, 8, 16, 32, 64, 128, 128, 128, 128])


def test_a_container_has_the_folders_of_the_run(work: Path) -> None:
    assert (
        launch(
            "--on",
            "slurm",
            "--out",
            "job",
            "--image",
            "nvcr.io#x/y:1",
            "--mount",
            "/data:/data",
            "--cpus-per-rank",
            "4",
        )
        == 0
    )
    script = (work / "job").read_text()
    assert "'--container-image=nvcr.io#x/y:1'" in script
    assert f"--container-mounts={work}:{work},{work}/runs/small:{work}/runs/small,/data:/data" in script
    assert script.count("--cpus-per-task=4") == 2  # srun does not take it over from sbatch
    assert "    shardwise train " in script


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("run", ["small.toml", str(LARGE)])
def test_objects_are_valid_by_their_published_schemas(
    work: Path, capsys: pytest.CaptureFixture[str], kind: str, run: str
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    yaml = pytest.importorskip("yaml")
    words = [
        "--image",
        "registry.example/train:1",
        "--volume",
        "claim:/mnt/runs",
        "--namespace",
        "team",
        "--queue",
        "q",
    ]
    words += ["--time", "120", "--env", "NCCL_DEBUG=INFO", "--cpus-per-rank", "2"]
    for more in ([], words):
        assert launch("--on", "kubernetes", "--kind", kind, "--out", "job", *more, run=run) == 0
        document = yaml.safe_load((work / "job").read_text())
        validator = jsonschema.Draft202012Validator(json.loads((HERE / "schemas" / f"{kind}.json").read_text()))
        validator.validate(document)
        assert not validator.is_valid(document | {"spec": document["spec"] | {"unknown": 1}})
    assert document["metadata"]["namespace"] == "team"
    assert document["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    container = container_of(document)
    # The run in it is the one that was launched.
    (work / "there.toml").write_text(container["env"][0]["value"])
    before = read_run(run)
    assert read_run("there.toml") == before
    resources = container.get("resources") or container["resourcesPerNode"]
    assert resources["limits"].get("nvidia.com/gpu") == (8 if run != "small.toml" else None)
    assert f"train /tmp/run.toml --out /mnt/runs/{before.name}" in container["command"][2]
    assert capsys.readouterr().err.count("no --volume") == 1


def container_of(document: dict[str, Any]) -> dict[str, Any]:
    if document["kind"] == "TrainJob":
        return document["spec"]["trainer"]
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]


def test_a_jobset_restarts_what_was_told_to_stop_without_counting_it(work: Path) -> None:
    yaml = pytest.importorskip("yaml")
    assert launch("--on", "kubernetes", "--out", "job", *TWO_BY_TWO) == 0
    spec = yaml.safe_load((work / "job").read_text())["spec"]
    (nodes,) = spec["replicatedJobs"]
    rules = nodes["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"] == {"containerName": "trainer", "operator": "In", "values": [75]}
    assert spec["failurePolicy"]["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert nodes["template"]["spec"]["completions"] == 2
    pod = nodes["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 150
    assert pod["containers"][0]["command"][2].endswith("--cluster.rendezvous=small-node-0-0.small:29500")


def test_torchrun_has_a_line_for_every_host(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--on", "torchrun", "--out", "job", *TWO_BY_TWO, "--hosts", "a,b") == 0
    lines = [line for line in (work / "job").read_text().splitlines() if line.startswith("ssh ")]
    assert len(lines) == 2
    assert "--nnodes=2 --nproc-per-node=2 --node-rank=1 --master-addr=a" in lines[1]
    assert subprocess.run(["bash", "-n", "job"]).returncode == 0
    assert launch("--on", "torchrun", "--out", "job", *TWO_BY_TWO, "--hosts", "a") == 2
    assert "must name the 2 machines of the run, as in a,b,c" in capsys.readouterr().err


def test_torchrun_is_started_as_the_command_says(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--on", "torchrun", "--out", "job", "--nodes", "1", "--ranks-per-node", "4", "--command")
    assert launch(*words, "nice -n 5 python3 -m shardwise") == 0
    assert " && nice -n 5 python3 -m torch.distributed.run --nnodes=1 " in (work / "job").read_text()
    for command in ("shardwise", "uv run shardwise", "-m shardwise"):
        assert launch(*words[:-1], f"--command={command}") == 2
        assert f'--command: "{command}" must end in -m shardwise' in capsys.readouterr().err


@pytest.mark.parametrize(("on", "name"), [("slurm", "srun"), ("torchrun", "torchrun")])
def test_elastic_replicas_are_not_for_starters_of_all_ranks(
    work: Path, capsys: pytest.CaptureFixture[str], on: str, name: str
) -> None:
    elastic = ("--layout.shard=1", "--layout.replicate=4", "--layout.sync_every=2", "--layout.sync_elastic=true")
    elastic += ("--train.schedule=constant",)
    assert launch("--on", on, "--out", "job", *elastic) == 2
    assert f"layout.sync_elastic: restarts replicas one by one, and {name} knows all ranks" in capsys.readouterr().err
    assert not (work / "job").exists()
    assert launch("--on", "kubernetes", "--out", "job", *elastic) == 0


def test_the_hosts_of_torchrun_end_with_the_exit_code_of_the_first_that_fails(work: Path) -> None:
    assert launch("--on", "torchrun", "--out", "job", *TWO_BY_TWO, "--hosts", "a,b") == 0
    command(work / "programs", "ssh", "case $1 in a) exit 75;; b) exit 1;; esac")
    environment = os.environ | dict(PATH=f"{work / 'programs'}:{os.environ['PATH']}")
    assert subprocess.run(["bash", "job"], cwd=work, env=environment, timeout=HANG_SECONDS).returncode == 75


def test_what_was_submitted_is_followed_and_cancelled(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = work / "programs"
    command(programs, "sbatch", "echo '42;one'")
    command(
        programs,
        "scontrol",
        'echo "JobId=42 JobName=small JobState=PENDING Reason=Priority NodeList=(null) Restarts=2"',
    )
    command(programs, "scancel", "")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    assert launch("--status") == 2
    assert "nothing was submitted from here" in capsys.readouterr().err
    assert launch("--on", "slurm", *TWO_BY_TWO, "--submit") == 0
    assert "submitted as 42" in capsys.readouterr().out
    folder = work / "runs" / "small"
    (taken,) = submissions(folder)
    assert taken.log == str(folder / "logs" / "slurm-42.out")
    assert launch("--logs") == 2
    assert "the job has not started" in capsys.readouterr().err
    Path(taken.log).write_text("one\ntwo\n")
    (folder / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    assert launch("--status") == 0
    assert capsys.readouterr().out == "job 42: pending, waits for Priority, requeued 2 times; step 7 of 10\n"
    assert launch("--logs") == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert launch("--cancel") == 0
    assert "scancel 42" in (programs / "calls").read_text()
    # The folder of a job that was only submitted is still free for its run.
    from shardwise.checkpoint.job import check_folder

    shutil.rmtree(folder / "logs")
    (folder / "metrics.jsonl").unlink()
    check_folder(read_run("small.toml"), folder)
    command(programs, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    capsys.readouterr()
    assert launch("--on", "slurm", *TWO_BY_TWO, "--submit") == 2
    assert capsys.readouterr().err.endswith("error: sbatch refused: sbatch: error: invalid partition specified: x\n")


def test_kubernetes_is_asked_by_kubectl(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = work / "programs"
    answer = '{"status": {"restarts": 1, "conditions": [{"type": "Completed", "status": "True"}]}}'
    command(
        programs, "kubectl", f"""case $1 in apply) echo jobset.jobset.x-k8s.io/small;; get) echo '{answer}';; esac"""
    )
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    assert launch("--on", "kubernetes", "--namespace", "team", "--submit") == 0
    assert launch("--status") == 0
    assert "jobset small: completed, restarted 1 times" in capsys.readouterr().out
    assert launch("--cancel") == 0
    calls = (programs / "calls").read_text().splitlines()
    assert calls[0].startswith("kubectl apply --namespace=team -f ")
    assert calls[-1] == "kubectl delete jobset small --namespace=team --wait=false"
    (programs / "kubectl").unlink()
    monkeypatch.setenv("PATH", str(programs))
    assert launch("--status") == 2
    assert "there is no kubectl here" in capsys.readouterr().err


def test_mistakes_are_sentences_all_at_once(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "novalue", "--option=partition", "--volume", "x", "--hosts", "a", "--queue", "q"]
    for given, expected in (
        ([], "--on: say who starts the ranks"),
        (["--on", "slurm", *words], '--env: "novalue" is not NAME=VALUE'),
        (["--on", "slurm", "--command", "python 'x"], "--command: python 'x has an open quotation"),
        (["--on", "torchrun", "--submit", "--image", "x"], "--submit: torchrun has no queue"),
        (["--on", "slurm", "--time", "soon"], "is no time limit such as 90 (minutes)"),
        (["--on", "slurm", "--nodes", "0"], "is not a whole number of 1 or more"),
        (["--on", "slurm", "--nodes", "3", "--ranks-per-node", "2"], "cluster."),
        (["--on", "slurm", "--out", "no/such/file"], "there is no folder"),
        (["--on", "pbs"], "invalid choice"),
    ):
        assert launch(*given) == 2
        said = capsys.readouterr().err
        assert expected in said
        assert "Traceback" not in said
    assert launch("--on", "slurm", *words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 6
    assert main(["launch", "none.toml", "--on", "slurm"]) == 2


def test_times_and_names() -> None:
    for text, seconds in (
        ("90", 5400), ("10:30", 630), ("12:00:00", 43200), ("2-12", 216000), ("1-00:30", 88200), ("1-00:00:01", 86401),
    ):  # fmt: skip
        assert parse_time(text) == seconds
        assert parse_time(time_text(seconds)) == seconds
    for bad in ("", "1h", "-5", "1:2:3:4", "0", "9" * 5000):
        with pytest.raises(UserError):
            parse_time(bad)
    assert [scheduler_name(name) for name in ("demo", "Llama 3_70B", "405b", "x" * 80, "--")] == [
        "demo", "llama-3-70b", "run-405b", "x" * 40, "run",
    ]  # fmt: skip
    assert requeues(expected=10000, start=600, limit=3600) == 3
    assert requeues(expected=1000, start=600, limit=3600) == 0
