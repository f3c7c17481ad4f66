"""The command as a user meets it: quick help without torch, sentences instead of tracebacks, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import VERBS, main, split_overrides
from shardwise.cli.serving.load import _texts


def test_help_names_every_verb_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from shardwise.cli.main import main; assert main(['--help']) == 0; "
        "heavy = {'torch', 'numpy', 'rich', 'safetensors', 'tokenizers', 'transformers'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in VERBS)


def test_each_verb_has_help_without_torch() -> None:
    code = (
        "import sys; from shardwise.cli.main import VERBS, main\n"
        "for verb in VERBS:\n"
        "    try: main([verb, '--help'])\n"
        "    except SystemExit as e: assert e.code == 0, verb\n"
        "    assert 'torch' not in sys.modules, verb"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"shardwise {verb}" in done.stdout for verb in VERBS)


def test_logs_of_failed_ranks_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message of a failure names them."""
    ended: list[int] = []
    places: list[Path] = []

    def start_local(words: list[str], world: int, logs: Path, passed_on: tuple[()]) -> int:
        (logs / "rank-1.log").write_text("why")
        places.append(logs)
        return ended.pop()

    monkeypatch.setattr("shardwise.train.processes.launch.start_local", start_local)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for code in (1, 2):
        ended.append(code)
        command = [
            "bench",
            "--only",
            "collectives",
            "--ranks",
            "2",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "p.json"),
        ]
        assert main(command) == 2
    assert [place.exists() for place in places] == [True, False]


def test_planning_side_imports_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; "
        "import shardwise.run, shardwise.plan.cost.flops, shardwise.hardware.chips, shardwise.data.batches"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_torch_training_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("")
    code = (
        "import sys; sys.modules['torch'] = None; from shardwise.cli.main import main; "
        f"sys.exit(main(['train', {str(tmp_path / 'r.toml')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "pip install '.[train]' in a checkout" in done.stderr
    # There is no release yet: nothing may send users to a package index for it.
    for text in (Path(__file__).parents[2] / name for name in ("README.md", "shardwise/run/problems.py")):
        assert not re.search(r"pip install '?shardwise", text.read_text())
    assert "Traceback" not in done.stderr


SERVED = ["plan", "--model.preset=llama3-8b", "--cluster.chip=h100", "--serve.rate=1", "--serve.requests=20"]


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["trian"], "did you mean train"),
        (["xyzzy"], "there are plan, workbench, train, watch"),
        (["train"], "required"),
        (["train", "absent.toml"], "cannot be read"),
        (["train", "absent.toml", "--bogus"], "--bogus"),
        (["config"], "name a run"),
        (["config", "--train.lr=fast"], "train.lr"),
        (["config", "--train.lr"], "has no value"),
        (["generate", "absent", "--prompt", "x"], "absent"),
        (["generate", "absent", "--prompt", "x", "--max-tokens", "9" * 25], "must be at least 1 and below 2^31"),
        (["generate", "absent", "--prompt", "x", "--top-k", "9" * 25], "must be at least 0 and below 2^31"),
        (["bench", "--ranks", "9" * 25], "--ranks: is 9999"),
        (["bench", "--seconds", "inf"], "--seconds: is inf"),
        ([*SERVED, "--serve.rate=1e-308"], "less than one request in 30 years"),
        ([*SERVED, "--serve.requests=1000000000"], "serve.requests: 1000000000 must be at most"),
        ([*SERVED, "--serve.memory_gib=1e308"], "serve.memory_gib: 1e+308 must be at most"),
        (["generate", "absent", "--prompt", "x", "--top-p", "0", "--max-tokens", "0"], "--top-p"),
        (["generate", "absent", "--prompt", "x", "--stop", ""], "--stop"),
        (["convert", "from-hf", "absent", "out"], "absent"),
        (["data", "build", "absent.txt", "--out", "x"], "absent.txt"),
        (["data", "show", "absent", "--train.lr=3"], "takes no run"),
        (["config", "--layout=autoo"], 'a whole layout is "auto"'),
        (["config", "--train=3"], "--train"),
        (["plan", "--model.preset=llama3-1b", "--html", ""], "not the name of a file"),
        (["plan", "--model.preset=llama3-1b", "--html", "absent/plan.html"], 'no folder "absent"'),
        (["plan", "--model.preset=llama3-1b", "--name=\udcff", "--html", "x.html"], "'\\udcff' cannot be encoded"),
        (["verify", "absent.toml", "--steps", "-5"], "whole number of 1 or more"),
        (["verify", "absent.toml", "--rank", "3"], "--dry"),
        (["verify", "absent.toml", "--time", "nan"], "number of 0 or more"),
        (["trace", "absent", "--dtype", "int3"], "did you mean int8"),
        (["trace", "absent", "--within", "-1"], "number of 0 or more"),
        (["validate", "--worst", "-1"], "whole number of 0 or more"),
        (["budget", "--flops", "inf"], "finite number of 1e+09 to 1e+36"),
        (["verify", "absent.toml", "--time", "inf"], "finite number of 0 or more"),
        (["verify", "absent.toml", "--steps", "9" * 5000], '9…" is not a whole number of 1 or more'),
        (["scale", "ladder", "absent.toml", "--rungs", "5000"], "--rungs: 5000 must be at most 100"),
        (["load", "http://127.0.0.1:1", "--rate", "1", "--input", "9" * 5000], "too long for a number of tokens"),
        (["load", "http://127.0.0.1:1", "--rate", "1", "--output", "x" * 5000], "too long for a number of tokens"),
        (["bench", "--rank", "5", "--device", "cpu", "--seconds", "0"], "--rank: is the rank of --rehearse"),
        (["eval", "absent", "--tasks", "q.jsonl", "--answers", "missing/a.jsonl"], 'no folder "missing"'),
        ([*SERVED, "--as", "nonsense"], "--as: is for runs that train"),
        ([*SERVED, "--max-microbatch", "7"], "--max-microbatch: is for runs that train"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_code_2(
    arguments: list[str],
    phrase: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert phrase in said
    assert all(line.startswith("error: ") for line in said.splitlines())
    assert not list(tmp_path.iterdir())


def test_a_load_that_is_nested_too_deeply_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, deep = tmp_path / "run.toml", tmp_path / "deep.json"
    run.write_text('[model]\npreset = "llama3-8b"\n[serve]\nrate = 1\n[cluster]\nchip = "h100"\n')
    deep.write_text("[" * 100_000)
    assert main(["verify", str(run), "--load", str(deep)]) == 2
    assert capsys.readouterr().err == f"error: {deep}: --load: is nested too deeply to be a load\n"


def test_rows_that_are_nested_too_deeply_are_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[" * 200_000)
    assert main(["validate", str(path)]) == 2
    assert "is nested too deeply" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 128 bytes."), " for another 128 bytes"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB"), " for another 2.00 GiB"),
        (MemoryError("Unable to allocate 7.45 GiB for an array"), " for another 7.45 GiB"),
        (MemoryError(), ""),
    ],
    ids=["cpu", "gpu", "array", "python"],
)  # fmt: skip
@pytest.mark.parametrize("has_agent", [False, True])
def test_memory_that_is_full_gets_a_sentence(
    error: Exception, said: str, has_agent: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> int:
        raise error

    monkeypatch.setattr("shardwise.cli.main.run_command", full)
    if has_agent:
        monkeypatch.setenv("SHARDWISE_AGENT", "1")
    assert main(["train", "run.toml"]) == (1 if has_agent else 2)
    assert capsys.readouterr().err.startswith(f"error: memory is full{said}; ")


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: object) -> int:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("shardwise.cli.main.run_command", wrong)
    with pytest.raises(RuntimeError, match="shapes"):
        main(["train", "run.toml"])


def test_who_reads_no_further_has_seen_enough() -> None:
    command = f"{sys.executable} -m shardwise plan --model.preset=llama3-1b --cluster.chip=h100 | head -1 > /dev/null"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_of_few_letters_shows_others() -> None:
    command = [sys.executable, "-m", "shardwise", "plan", "--model.preset=llama3-1b", "--cluster.chip=h100"]
    command += ["--train.global_batch=1", "--train.dtype=bfloat16"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "microbatch 1 x 1" in done.stdout


def test_config_prints_the_resolved_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "big.toml"
    file.write_text('[model]\npreset = "llama3-8b"\n')
    assert main(["config", str(file), "--json", "--train.steps", "5"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["name"], values["model"]["kv_heads"], values["train"]["steps"]) == ("big", 8, 5)
    assert main(["config", str(file)]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    assert main(["config", str(tmp_path / "again.toml"), "--json", "--train.steps=5"]) == 0
    assert json.loads(capsys.readouterr().out) == values
    assert main(["config", "--schema"]) == 0
    assert "microbatch" in capsys.readouterr().out
    assert main(["config", "--schema", "--json"]) == 0
    assert {"key", "type", "default", "meaning"} == set(json.loads(capsys.readouterr().out)[0])


def test_overrides_may_stand_anywhere_and_take_either_form() -> None:
    overrides, rest = split_overrides(["--train.lr=1", "run.toml", "--model.layers", "3", "--out", "x", "--name=y"])
    assert overrides == ["train.lr=1", "model.layers=3", "name=y"]
    assert rest == ["run.toml", "--out", "x"]


def test_a_prompt_ends_where_its_line_ends(tmp_path: Path) -> None:
    """And a byte order mark, with which editors save a file, is in none."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("one\u2028two\r\n\r\nthree\x0cfour\n".encode("utf-8-sig"))
    assert _texts(file) == ["one\u2028two", "three\x0cfour"]


@pytest.mark.parametrize("url", ["http://one..two:8000", f"http://{'x' * 64}:8000"], ids=["empty", "long"])
def test_a_name_that_no_host_has_is_a_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", url, "--rate", "1", "--requests", "1"]) == 2
    assert f"error: {url} does not name a host: " in capsys.readouterr().err
