"""`shardwise data build` and `show`, as a user meets them."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli.files.data import add_arguments, execute, megabytes, progress_on
from shardwise.data.build import Progress
from shardwise.run import UserError


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return execute(parser.parse_args([str(a) for a in arguments]))


@pytest.fixture
def built(tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Path:
    path = write_jsonl("in.jsonl", ["Hello, ", "", "wörld!"])
    assert run("build", path, "--out", tmp_path / "out", "--workers", 1) == 0
    return tmp_path / "out"


def test_build_says_what_it_did(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("build", tmp_path / "in.jsonl", "--out", built)
    text = capsys.readouterr().out
    assert "already built" in text
    assert "2 (1 empty ones left out)" in text
    assert "16 as uint16, in 1 shard" in text
    assert f"--data.sets={built}\n" in text


def test_build_as_json(tmp_path: Path, write_jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl("in.jsonl", ["Hello, ", "", "wörld!"], field="body")
    options = ["--field", "body", "--shard-tokens", 5, "--workers", 1, "--json"]
    assert run("build", path, "--out", tmp_path / "out", *options) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["empty_documents"], summary["tokens"]) == (2, 1, 16)
    assert (summary["text_bytes"], summary["shards"], summary["dtype"]) == (14, 4, "uint16")
    with pytest.raises(UserError, match="--restart"):
        run("build", path, "--out", tmp_path / "out", "--field", "id")
    with pytest.raises(UserError, match="is a number"):
        run("build", path, "--out", tmp_path / "out", "--field", "id", "--restart", "--workers", 1)


def test_show(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("show", built) == 0
    text = capsys.readouterr().out
    assert "byte, 257 tokens, 256 ends a document" in text
    assert "Hello, wörld!" in text
    assert run("show", built, "--json") == 0
    holdings = json.loads(capsys.readouterr().out)
    assert holdings["excerpt"] == "Hello, wörld!"
    assert holdings["shards"] == [{"file": "tokens-00000.bin", "tokens": 16}]
    with pytest.raises(UserError, match="half"):
        run("show", built.parent)


def test_the_verb_imports_nothing_heavy() -> None:
    heavy = ("numpy", "rich", "tokenizers", "torch")
    code = f"import sys, shardwise.cli.files.data; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_data_imports_nothing_heavy() -> None:
    heavy = ("torch", "tokenizers", "pyarrow", "rich")
    code = f"import sys, shardwise.data, shardwise.data.build; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_lines_in_a_log() -> None:
    stream = io.StringIO()
    with progress_on(stream) as progress:
        progress(Progress(10_000_000, 2_000_000, 2_000_000, 0, 0.0))
        progress(Progress(10_000_000, 2_000_000, 3_000_000, 100, 9.0))
        assert stream.getvalue() == ""
        progress(Progress(10_000_000, 2_000_000, 4_000_000, 5000, 10.0))
    assert stream.getvalue() == "40.0%  4.0 MB of 10.0 MB, 500 tokens/s, 30s left\n"


def test_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with progress_on(stream) as progress:
        progress(Progress(2_000_000, 0, 1_000_000, 5000, 1.0))
    text = stream.getvalue()
    assert "tokenising" in text
    assert "50%" in text
    assert "tokens/s" in text


def test_bytes_for_people() -> None:
    assert [megabytes(b) for b in (12, 1500, 2.5e6, 3e12)] == ["12 bytes", "1.5 kB", "2.5 MB", "3000.0 GB"]
