"""Kernels in Triton's interpreter, which stands for the GPU. It is chosen as Triton is imported, hence in a process of its own: one
that imports PyTorch and Triton once, and forks for each script of kernels that a test names."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO


class Interpreter:
    """The process, started when a test first asks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: Path, *arguments: str) -> None:
        """Run a script as the main program; what it raises is the failure."""
        if self._process is None:
            environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(script), *arguments]), file=self._process.stdin, flush=True)
        status, said = json.loads(self._process.stdout.readline())
        assert status == 0, said

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate("")


def answer(line: str) -> tuple[int, str]:
    """Run what a line asks for in a fork; gives its status and what it said."""
    script, *arguments = json.loads(line)
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            _become(script, arguments, said)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return status, said.read()


def _become(script: str, arguments: list[str], said: IO[str]) -> None:
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    import hypothesis
    import torch
    import triton

    import shardwise.model

    torch.set_num_threads(1)
    del hypothesis, triton, shardwise
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)
