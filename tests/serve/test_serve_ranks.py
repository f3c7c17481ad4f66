"""The verbs on several ranks: they answer as one device does, end when told, and end when a rank is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_SECONDS
from running import until

from shardwise.cli.main import main
from shardwise.run import run_from_dict, to_toml

PROMPT = "the same beginning of all of them, "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small model that no training has touched."""
    from safetensors.torch import save_file

    from shardwise.model import Transformer, initialize

    folder = tmp_path_factory.mktemp("checkpoint")
    run = run_from_dict(
        dict(
            name="tiny",
            model=dict(layers=2, hidden=32, heads=4, vocab=257, max_positions=256, experts=4, experts_per_token=2),
            train=dict(device="cpu", dtype="float64"),
            serve=dict(page_tokens=4, max_sequences=8),
            layout=dict(shard=2, expert=2),
        )
    )
    model = Transformer(run.model)
    initialize(model, run.model, 0)
    save_file({name: 8 * value for name, value in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "run.toml").write_text(to_toml(run))
    (folder / "shardwise_tokenizer.json").write_text('{"kind": "byte"}')
    return folder


@contextmanager
def served(folder: Path, *layout: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it says."""
    command = [sys.executable, "-m", "shardwise", "serve", str(folder), "--port", "0", *layout]
    environment = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(folder))  # where logs of a failure stay
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:"), process.communicate()
        yield process, line.split(" at ")[1].strip()
    finally:
        process.kill()
        process.communicate()


def ask(url: str, prompt: str, tokens: int = 12, **more: Any) -> dict[str, Any]:
    body = dict(prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True) | more
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return json.loads(urllib.request.urlopen(request, timeout=HANG_SECONDS).read())


def metrics(url: str) -> dict[str, float]:
    said = urllib.request.urlopen(f"{url}/metrics", timeout=HANG_SECONDS).read().decode()
    lines = [line.rsplit(" ", 1) for line in said.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """The processes that a command's fork server made its ranks, by the logs that they write."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            server = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1]
            log = (folder / "fd" / "2").readlink().name
        except (OSError, IndexError):
            continue
        if int(command) == process.pid and log.startswith("rank-"):
            found[int(log[5:-4])] = int(folder.name)
    return found


@pytest.mark.drawn(group="servers")
def test_replicas_of_two_ranks(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They answer as one device does, find equal prefixes where they are cached, and end well in the middle of a request."""
    asked = ["generate", str(checkpoint), "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0", "--json"]
    assert main(asked) == 0
    alone = json.loads(capsys.readouterr().out)["samples"][0]["text"]
    with served(checkpoint, "--layout.replicate=2", "--layout.tensor=2", "--layout.expert=2") as (process, url):
        assert ask(url, PROMPT)["choices"][0]["text"] == alone
        for n in range(3):
            ask(url, f"{PROMPT}{n}", tokens=1)
        full = len(PROMPT) // 4 * 4
        assert metrics(url)["shardwise_prefix_hits_total"] == 3 * full, "all of them by one replica"
        schema = {"type": "integer", "minimum": 100, "maximum": 999}
        form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
        together = ask(url, ["one", "two", "three", "four"], response_format=form, ignore_eos=False)
        assert all(100 <= int(choice["text"]) <= 999 for choice in together["choices"])
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(ask(url, PROMPT, 150)))
        thread.start()
        until(lambda: metrics(url)["shardwise_sequences_running"] == 1)
        process.send_signal(signal.SIGTERM)
        thread.join(HANG_SECONDS)
        assert answers[0]["usage"]["completion_tokens"] == 150
        assert process.wait(HANG_SECONDS) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds ranks as Linux lists processes")
@pytest.mark.drawn(group="servers")
def test_a_lost_rank_ends_the_server_with_a_sentence(checkpoint: Path) -> None:
    with served(checkpoint, "--layout.pipeline=2") as (process, url):

        def ask_in_vain() -> None:
            with suppress(OSError, HTTPException):
                ask(url, PROMPT, 200)

        asking = threading.Thread(target=ask_in_vain)
        asking.start()
        until(lambda: metrics(url)["shardwise_sequences_running"] == 1)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        assert process.wait(HANG_SECONDS) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        assert said.startswith("error: rank 1 was killed by SIGKILL\n")
        assert "Traceback" not in said
        until(lambda: not ranks_of(process))
        asking.join(HANG_SECONDS)


@pytest.mark.large("ranks that torchrun started, and generate on them")
def test_ranks_that_torchrun_started(checkpoint: Path) -> None:
    asked = ["generate", str(checkpoint), "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0", "--json"]
    runner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "shardwise"]
    told = []
    for command in ([sys.executable, "-m", "shardwise", *asked], [*runner, *asked, "--layout.tensor=2"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout)["samples"])
    assert told[0] == told[1]


def test_a_layout_that_does_not_fit_is_refused_before_ranks_are_started(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(checkpoint), "--layout.tensor=3"]) == 2
    assert "3 does not divide model.heads = 4" in capsys.readouterr().err
