"""Slurm arrays, Ray and lost workers write the bytes that one process writes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.data.prepare import executors
from shardwise.data.prepare.prepare import prepare
from shardwise.data.prepare.recipe import read_recipe
from shardwise.launch.submission import submissions
from shardwise.run.problems import Problem

Read = Callable[[Path], dict[str, bytes]]
SBATCH = """#!{python}
import json, os, re, subprocess, sys
from pathlib import Path
here = Path({here!r})
calls = json.loads((here / "calls").read_text()) if (here / "calls").exists() else []
text = Path(sys.argv[-1]).read_text()
calls.append(text)
(here / "calls").write_text(json.dumps(calls))
after = re.search("dependency=afterok:([0-9]+)", text)
assert not after or int(after[1]) == len(calls) - 1, "after a job that is not the one before"
if int(os.environ["FAILS"]) != len(calls):
    tasks = int(re.search("--array=0-([0-9]+)", text)[1]) + 1
    for task in reversed(range(tasks)):
        environment = os.environ | {{"SLURM_ARRAY_TASK_ID": str(task)}}
        subprocess.run(["bash", sys.argv[-1]], env=environment, check=True, stdout=subprocess.DEVNULL)
else:
    print("sbatch: error: no such partition", file=sys.stderr)
    sys.exit(1)
print(f"{{len(calls)}};cluster")
"""


@pytest.mark.drawn(group="preparation")
def test_slurm_arrays(
    corpus: Path, written: Read, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sbatch` here does a job at once, its tasks from the last to the first; one job is refused, and the same command goes on."""
    steps = '[[steps]]\nkind = "exact"\n'
    (corpus / "recipe.toml").write_text(f'[[sources]]\nname = "web"\npaths = ["a.jsonl", "b.jsonl"]\n{steps}')
    main(["data", "prepare", str(corpus / "recipe.toml"), "--out", str(corpus / "local"), "--workers", "1"])
    programs = corpus / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(SBATCH.format(python=sys.executable, here=str(programs)))
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    out = corpus / "slurm"
    command = ["data", "prepare", str(corpus / "recipe.toml"), "--out", str(out), "--executor", "slurm"]
    assert main(command) == 2
    assert "--workers: is needed for Slurm" in capsys.readouterr().err
    write_text = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda path, text, encoding="ascii": write_text(path, text, encoding))
    command += ["--workers", "2", "--option=--partition=cpu", "--option=--comment=modèle", "--json"]
    monkeypatch.setenv("FAILS", "2")
    assert main(command) == 2
    assert "sbatch refused: sbatch: error: no such partition" in capsys.readouterr().err
    (programs / "calls").unlink()
    monkeypatch.setenv("FAILS", "0")
    assert main(command) == 0
    assert len(json.loads(capsys.readouterr().out)["jobs"]) == 3  # what was done is not submitted again
    assert all("#SBATCH --partition=cpu" in text for text in json.loads((programs / "calls").read_text()))
    assert len(submissions(out)) == 4
    made = {name: data for name, data in written(out).items() if not name.startswith(("launch/", "logs/"))}
    assert made == written(corpus / "local")
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"jobs": []}


def dying(folder: str, digest: str, stage: str, number: int) -> list[Problem]:
    """A task whose worker dies the first time."""
    mark = Path(folder).parent / f"died-{stage}"
    if stage == "map-0" and not mark.exists():
        mark.touch()
        os._exit(9)
    return REAL(folder, digest, stage, number)


REAL = executors.attempt


@pytest.mark.drawn(group="preparation")
def test_workers_make_no_difference_and_are_replaced_when_they_die(
    corpus: Path, written: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe(corpus / "recipe.toml")
    prepare(recipe, corpus, corpus / "whole", workers=1)
    monkeypatch.setattr(executors, "attempt", dying)
    prepare(recipe, corpus, corpus / "lost", workers=2)
    assert (corpus / "died-map-0").exists()
    assert written(corpus / "lost") == written(corpus / "whole")


@pytest.mark.large("Ray itself: its workers, one of them killed by the system in the middle")
def test_ray_with_a_killed_worker(corpus: Path, written: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    recipe = read_recipe(corpus / "recipe.toml")
    prepare(recipe, corpus, corpus / "whole", workers=1)
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
    try:
        monkeypatch.setattr(executors, "attempt", dying)
        prepare(recipe, corpus, corpus / "ray", executor="ray", workers=4)
    finally:
        ray.shutdown()
    assert (corpus / "died-map-0").exists()
    assert written(corpus / "ray") == written(corpus / "whole")
