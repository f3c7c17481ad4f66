"""What a command prints where nobody can read it: a closed pipe, a full disk, no output at all. Nobody gets a traceback, not from
Python's last flush either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = ("plan", "--model.layers=2", "--cluster.chip=h100", "--json")
COMMANDS = pytest.mark.parametrize("words", [PLAN, ("config", "--help"), ("--version",)], ids=" ".join)


def said(words: tuple[str, ...], stdout: int | None = None, around: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and stderr of a command whose output is buffered, as users have it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [*around, sys.executable, "-m", "shardwise", *words]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    return done.returncode, done.stderr


@COMMANDS
def test_a_reader_that_has_gone_is_no_mistake(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert said(words, write) == (0, "")
    finally:
        os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@COMMANDS
def test_a_full_disk_behind_stdout_is_a_sentence(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        code, error = said(words, full.fileno())
    # argparse itself ignores that its help cannot be written.
    assert (code, error) in ((2, "error: No space left on device\n"), (0, "") if "--help" in words else ())


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_plan_without_any_output_is_made_all_the_same(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert said((*PLAN, f"--html={page}"), None, ("sh", "-c", 'exec "$@" >&-', "sh")) == (0, "")
    assert page.stat().st_size
