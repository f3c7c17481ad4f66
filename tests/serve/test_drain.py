"""The end of a server: told once it takes nothing new and finishes what runs; told again it ends at once. And the verbs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_engine import FakeEngine, letters
from patience import HANG_SECONDS
from running import exchange, post, running, until

from shardwise.cli.main import main
from shardwise.serve.server.limits import Limits

HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def ask(tokens: int, stream: bool = True) -> bytes:
    return post("/v1/completions", {"prompt": "a", "max_tokens": tokens, "stream": stream, "ignore_eos": True})


def test_what_runs_is_finished_and_nothing_new_is_taken() -> None:
    with running(FakeEngine(script=letters, delay=0.005)) as server:
        said: list[bytes] = []
        threads = [
            threading.Thread(target=lambda s=s: said.append(exchange(server, ask(100, s)))) for s in (True, False)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.context.service.stats.running == 2)
        server.tell_to_stop()
        until(lambda: server.context.service.draining)
        for sent in (HEALTH, ask(1)):
            head, _, body = exchange(server, sent).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert json.loads(body)["error"]["code"] == "shutting_down"
        for thread in threads:
            thread.join(HANG_SECONDS)
        server.thread.join(HANG_SECONDS)
        assert not server.thread.is_alive()
        stream, whole = sorted(said, key=lambda each: b"event-stream" not in each)
        assert stream.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
        assert json.loads(whole.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 100
        assert server.engine.idle


@pytest.mark.parametrize("twice", [False, True])
def test_what_does_not_end_in_time_is_aborted(twice: bool) -> None:
    limits = Limits(drain_seconds=60 if twice else 0.05)
    with running(FakeEngine(delay=0.001, max_tokens=10**9), limits=limits) as server:
        said: list[bytes] = []
        threads = [
            threading.Thread(target=lambda s=s: said.append(exchange(server, ask(10**8, s)))) for s in (True, False)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.context.service.stats.running == 2)
        server.tell_to_stop()
        if twice:
            server.tell_to_stop()
        for thread in threads:
            thread.join(HANG_SECONDS)
        server.thread.join(HANG_SECONDS)
        stream, whole = sorted(said, key=lambda each: b"event-stream" not in each)
        assert b'"shutting_down"' in stream
        assert whole.startswith(b"HTTP/1.1 503")
        assert server.engine.aborted == 2


SERVER = """
import sys, types
sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine, letters
module = types.ModuleType("shardwise.serve.engine")
module.make_engine = lambda folder, run: FakeEngine(script=letters, delay=0.002, max_tokens=10000)
sys.modules[module.__name__] = module
from shardwise.cli.main import main
sys.exit(main(["serve", {folder!r}, "--port", "0", "--model-name", "demo", "--api-key", "@{key}"]))
"""


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with a fake engine, and the address that it says."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "run.toml").write_text("")
    (checkpoint / "model.safetensors").write_bytes(b"")
    (checkpoint / "shardwise_tokenizer.json").write_text('{"kind": "byte"}')
    (folder / "keys").write_text("secret\n")
    code = SERVER.format(tests=str(Path(__file__).parent), folder=str(checkpoint), key=folder / "keys")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving demo at http://127.0.0.1:"), process.communicate()
        yield process, line.split(" at ")[1].strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.drawn(group="servers")
def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`load` measures what `serve` serves; SIGTERM then ends it well, in the middle of a request."""
    with served(tmp_path) as (process, url):
        lengths = ["--input", "U(5,20)", "--output", "7"]
        load = ["load", url, "--api-key", "secret", "--requests", "30", *lengths]
        assert main([*load, "--rate", "200", "--json", "--html", str(tmp_path / "load.html")]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (30, 0, 210)
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]
        assert figures["tpot_ms"]["p50"] >= 2
        assert "<svg" in (tmp_path / "load.html").read_text()

        assert main([*load, "--concurrency", "4", "--ttft-limit", "0", "--tpot-limit", "1000"]) == 0
        said = capsys.readouterr().out
        assert "time to first token" in said
        assert "0% kept ttft" in said

        assert main([*load[:2], "--concurrency", "1"]) == 2
        assert "You did not provide an API key" in capsys.readouterr().err

        running = threading.Thread(target=lambda: main([*load, "--concurrency", "30", "--output", "150", "--json"]))
        running.start()

        def metrics() -> str:
            return urllib.request.urlopen(f"{url}/metrics", timeout=HANG_SECONDS).read().decode()

        until(lambda: "shardwise_sequences_running 30" in metrics())
        process.send_signal(signal.SIGTERM)
        running.join(HANG_SECONDS)
        assert process.wait(HANG_SECONDS) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["failed"], figures["output_tokens"]) == (0, 4500)
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["load", "ftp://a", "--rate", "1"], "no address of a server"),
        (["load", "http://127.0.0.1:9", "--rate", "1"], "no server at 127.0.0.1:9"),
        (["load", "http://a"], "--rate"),
        (["load", "http://a", "--rate", "1", "--input", "many"], "neither a number"),
        (["load", "http://a", "--rate", "1", "--output", "U(9,3)"], "make no sense"),
        (["load", "http://a", "--rate", "1", "--prompts", "absent"], "cannot be read"),
        (["serve", "absent"], "no such folder"),
        (["serve", "absent", "--api-key", ""], "would let everybody in"),
        (["serve", "absent", "--api-key", "@absent"], "cannot be read"),
    ],
)
def test_mistakes(
    arguments: list[str],
    phrase: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert phrase in said
    assert "Traceback" not in said
    assert not os.listdir(tmp_path)
