"""Work on a second core: its result, its failure, and a search whose result does not depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = "import shardwise.plan.search.beside as b; b.cores = lambda: 1\n"
SCRIPT = """
import json, os
from shardwise.plan.search.beside import beside, cores
from shardwise.plan.search.fitting import PLAY_ALL
from shardwise.plan.search import search
from shardwise.run import run_from_dict

def fails():
    if os.getpid() != here:
        raise ValueError
    return "here"

here = os.getpid()
elsewhere = beside(os.getpid)
failed = beside(fails)
run = run_from_dict(dict(
    model=dict(preset="llama3-70b"), layout="auto",
    train=dict(global_batch=512, seq_len=4096, dtype="bfloat16"), cluster=dict(chip="h100", nodes=8),
))
found = search(run, keep=4)
assert found.searched > 10 * PLAY_ALL
print(json.dumps([cores(), elsewhere() != here, failed(), found.as_dict()]))
"""


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs a second core")
def test_a_search_on_two_cores_finds_what_one_core_finds(tmp_path: Path) -> None:
    def told(script: str) -> list[object]:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert not done.stderr
        found: list[object] = json.loads(done.stdout)
        return found

    count, elsewhere, failed, two = told(SCRIPT)
    assert [isinstance(count, int) and count > 1, elsewhere, failed] == [True, True, "here"]
    assert told(ALONE + SCRIPT) == [1, False, "here", two]
