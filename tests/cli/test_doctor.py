"""`shardwise doctor`, `--version` and completion."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from shardwise import __version__
from shardwise.cli.completion import candidates
from shardwise.cli.machinery.versions import package_versions, torch_built_for
from shardwise.cli.main import VERBS, main
from shardwise.measure import doctor


def test_json_has_versions_and_findings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["good"] is True
    assert said["versions"]["torch"] == torch.__version__
    assert said["versions"]["shardwise"] == __version__
    topics = {each["topic"] for each in said["findings"]}
    assert {"python", "packages", "torch", "gpus", "limits", "disk", "clock", "network"} <= topics
    assert all(each["mend"] for each in said["findings"] if each["state"] != "good")
    assert not list(tmp_path.iterdir())
    assert main(["doctor"]) == 0
    assert "FAILS" not in capsys.readouterr().out


def test_a_run_that_cannot_start_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\npreset = "llama3-70b"\n[layout]\nshard = 8\n[cluster]\nchip = "h100"\n[data]\nsets = ["nowhere"]\n'
    )
    assert main(["doctor", str(run), "--json"]) == 1
    said = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"] if each["topic"] == "run"}
    assert said["memory"]["state"] == "bad"
    assert said["data"]["value"] == "nowhere"
    assert "no GPU" in said["cluster.chip"]["mend"]


def test_a_run_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    assert main(["doctor", missing, "--json"]) == 1
    (said,) = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["topic"] == "run"]
    assert said["mend"] == f"{missing}: cannot be read: No such file or directory"


def test_what_is_missing_has_a_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict.fromkeys(package_versions(), "")
    found = {each.name: each for each in doctor.examine(versions, "", tmp_path)}
    assert ".[train]" in found["torch"].mend
    assert "trace" in found["msgspec"].mend
    old = {each.name: each for each in doctor._torch("2.4.1", "CPUs")}
    assert old["version"].state == "bad"
    # A driver says that there are cards, and this PyTorch is built without CUDA.
    card = ["0", "345", "1980", "31", "500.00", "700.00", "Not Active", "0"]
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: [card])
    (gpus,) = doctor._gpus("CPUs")
    assert (gpus.state, "install one that is built for CUDA" in gpus.mend) == ("bad", True)
    (capped,) = doctor._gpu_clocks([card])
    assert "cluster.power_w = 500" in capped.mend
    (slow,) = doctor._gpu_clocks([[*card[:6], "Active", "0"]])
    assert slow.state == "bad"
    (broken,) = doctor._gpu_clocks([[*card[:6], "Not Active", "3"]])
    assert "3 uncorrected" in broken.value


def test_version_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"shardwise {__version__}"
    assert f"torch {torch.__version__} for {torch_built_for()}" in second
    assert torch_built_for() == ("CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}")


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("shardwise ", set(VERBS)),
        ("shardwise tr", {"train", "trace"}),
        ("shardwise plan --js", {"--json"}),
        ("shardwise plan --layout.sched", {"--layout.schedule="}),
        ("shardwise plan --model.preset=llama3-7", {"--model.preset=llama3-70b"}),
        ("shardwise train run.toml --train.dtype=b", {"--train.dtype=bfloat16"}),
        ("shardwise plan --layout=", {"--layout=auto"}),
        ("shardwise completion z", {"zsh"}),
        ("shardwise data b", {"build"}),
        ("shardwise data build --k", {"--kind"}),
        ("shardwise data score --train.dt", {"--train.dtype="}),
        ("shardwise scale fit x.csv --fo", {"--form"}),
        ("shardwise nothing --", set()),
    ],
)
def test_what_may_follow(line: str, some: set[str]) -> None:
    found = set(candidates(line.split(" ")))
    assert some <= found
    assert all(word.startswith(line.split(" ")[-1]) for word in found)
    assert len(found) > 1 or found == some


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_takes_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    asked = f"{script}\nshardwise() {{ echo llama3-70b; }}\nCOMP_LINE='shardwise plan --model.preset=llama3-7' COMP_POINT=99\n"
    done = subprocess.run(
        ["bash", "-c", asked + "_shardwise 2>/dev/null; echo ${COMPREPLY[0]}"], capture_output=True, text=True
    )
    assert done.stdout == "llama3-70b\n"
    assert main(["completion", "bash", "--line", "shardwise plan --model.preset=llama3-7"]) == 0
    assert capsys.readouterr().out == "llama3-70b\n"  # after the equals sign, which begins a word for bash
