"""Training and serving from Python, in their own processes: ranks are started, signalled and cleaned up as by the command, and a
notebook keeps its memory, its threads and its signals to itself."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shardwise.api.results import Result
from shardwise.run import Run, to_toml
from shardwise.run.problems import Problem, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

COMMAND = (sys.executable, "-m", "shardwise")
KEPT = 40
"""Last lines of a process's output that an error shows."""


class TrainResult(Result):
    """A run folder: the records that training has written so far."""

    def __init__(self, folder: Path, stopped: bool = False) -> None:
        self.folder, self.stopped = folder, stopped
        """`stopped`: it was told to end and has saved a checkpoint; train it again to continue."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record for each step, and one for each evaluation."""
        from shardwise.train.progress.metrics import read_metrics

        return read_metrics(self.folder)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Pairs of step and loss. A loss that is not finite is stored as text."""
        return [(record["step"], float(record["loss"])) for record in self.metrics if "loss" in record]

    @property
    def loss(self) -> float:
        """Loss of the last step."""
        found = self.losses
        return found[-1][1] if found else float("nan")

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "stopped": self.stopped, "metrics": self.metrics}

    def rows(self) -> list[dict[str, Any]]:
        return self.metrics

    def page(self) -> str:
        from shardwise.report import html, plot, words

        losses = plot.Series("loss", [(step, loss) for step, loss in self.losses if math.isfinite(loss)])
        drawn = plot.svg([plot.Plot("Loss", "step", "loss", [losses], log_x=False)])
        figures = [("folder", self.folder.name, str(self.folder)), ("loss", f"{self.loss:.4f}", "of the last step")]
        if speeds := [record["tokens_per_s"] for record in self.metrics if record.get("tokens_per_s")]:
            figures.append(("speed", words.rate(sorted(speeds)[len(speeds) // 2], "tokens"), "median of the steps"))
        return html.page(f"Training of {self.folder.name}", [html.key_figures(figures), html.Section("", "", drawn)])

    def _shown(self) -> Sequence[RenderableType]:
        end = "stopped; call train again to resume" if self.stopped else "done"
        return [f"{self.folder}: {len(self.losses)} steps, loss {self.loss:.4f}, {end}"]


def train_run(run: Run, out: Path | None, quiet: bool) -> TrainResult:
    """Train, and print the output of training as it arrives."""
    from shardwise.train.faults.stop import PREEMPTED

    folder = out or Path("runs") / run.name
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / f"{run.name}.toml"
        file.write_text(to_toml(run), encoding="utf-8")
        child = _start(["train", str(file), "--out", str(folder)])
        last: deque[str] = deque(maxlen=KEPT)
        assert child.stdout is not None
        while True:
            try:
                for line in child.stdout:
                    last.append(line)
                    if not quiet:
                        print(line, end="", flush=True)
                code = child.wait()
                break
            except KeyboardInterrupt:  # training saves a checkpoint, and reports it
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal.SIGINT)
            except BaseException:  # its output cannot be printed: nobody would know of it, and its run file goes
                child.terminate()
                child.communicate()
                raise
    if code in (0, PREEMPTED):
        return TrainResult(folder, stopped=code == PREEMPTED)
    raise _failure("training", code, last)


class Server:
    """A server in another process, until `stop()` or the end of its `with` block."""

    def __init__(self, child: subprocess.Popen[str], url: str, api_key: str = "") -> None:
        self.child, self.url, self._api_key = child, url, api_key
        # Nobody else reads its output; a full pipe would block it.
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.child.stdout is not None
        for _ in self.child.stdout:
            pass

    def complete(self, prompt: str, **fields: Any) -> str:
        """Continue a text: `/v1/completions` with these fields (`max_tokens=…`, `temperature=…`)."""
        import json
        from urllib.request import Request, urlopen

        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"

        def answer(path: str, body: bytes | None = None) -> Any:
            return json.loads(urlopen(Request(f"{self.url}/v1/{path}", body, headers)).read())

        model = answer("models")["data"][0]["id"]
        body = json.dumps({"model": model, "prompt": prompt, **fields}).encode()
        return answer("completions", body)["choices"][0]["text"]

    def stop(self) -> None:
        """Let running requests finish, then end the server."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        self.child.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Server({self.url}{'' if self.child.poll() is None else ', stopped'})"


def start_server(checkpoint: Path, options: Mapping[str, Any]) -> Server:
    """Start a server and wait until it is ready."""
    from shardwise.cli.serving.serve import keys_of

    key = next(iter(keys_of([str(options["api_key"])])), "") if "api_key" in options else ""
    words = ["serve", str(checkpoint)]
    for name, value in ({"port": 0} | dict(options)).items():
        word = name if "." in name else name.replace("_", "-")
        words.append(f"--{word}={str(value).lower() if isinstance(value, bool) else value}")
    child = _start(words)
    assert child.stdout is not None
    last: deque[str] = deque(maxlen=KEPT)
    try:
        for line in child.stdout:
            last.append(line)
            if line.startswith("serving ") and " at http" in line:
                return Server(child, line.rpartition(" at ")[2].strip(), key)
    except BaseException:
        child.terminate()
        child.wait()
        raise
    raise _failure("the server", child.wait(), last)


def _start(words: Sequence[str]) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])  # child processes must also find a checkout that is not installed
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    # A session of its own: an interrupt from a notebook or terminal reaches only this process, which forwards it once.
    return subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, start_new_session=True,
    )  # fmt: skip


def _failure(what: str, code: int, last: Sequence[str]) -> Exception:
    """A user's mistake as the process reported it; any other error with its last lines."""
    said = [line.removeprefix("error: ").strip() for line in last if line.startswith("error: ")]
    if code == 2 and said:
        return UserError(*map(Problem, said))
    return RuntimeError(f"{what} ended with exit code {code}:\n{''.join(last)}")
