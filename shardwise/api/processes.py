"""Training and serving from Python, as processes of their own: ranks are started, signalled and cleaned up as the command does it,
and a notebook keeps its memory, its threads and its signals to itself."""

from __future__ import annotations

import contextlib
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
"""Lines of a process that an error shows."""


class TrainResult(Result):
    """A run folder: the records that training wrote, as they are now."""

    def __init__(self, folder: Path, stopped: bool = False) -> None:
        self.folder, self.stopped = folder, stopped
        """`stopped`: it was told to end and has saved a checkpoint; train it again to go on."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A record a step, and one an evaluation."""
        from shardwise.train.progress.metrics import read_metrics

        return read_metrics(self.folder)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and loss."""
        return [(record["step"], record["loss"]) for record in self.metrics if "loss" in record]

    @property
    def loss(self) -> float:
        """Of the last step."""
        found = self.losses
        return found[-1][1] if found else float("nan")

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "stopped": self.stopped, "metrics": self.metrics}

    def rows(self) -> list[dict[str, Any]]:
        return self.metrics

    def page(self) -> str:
        from shardwise.report import html, plot, words

        losses = plot.Series("loss", self.losses)
        drawn = plot.svg([plot.Plot("Loss", "step", "loss", [losses], log_x=False)])
        figures = [("folder", self.folder.name, str(self.folder)), ("loss", f"{self.loss:.4f}", "of the last step")]
        if speeds := [record["tokens_per_s"] for record in self.metrics if record.get("tokens_per_s")]:
            figures.append(("speed", words.rate(sorted(speeds)[len(speeds) // 2], "tokens"), "median of the steps"))
        return html.page(f"Training of {self.folder.name}", [html.key_figures(figures), html.Section("", "", drawn)])

    def _shown(self) -> Sequence[RenderableType]:
        end = "stopped; call train again to resume" if self.stopped else "done"
        return [f"{self.folder}: {len(self.losses)} steps, loss {self.loss:.4f}, {end}"]


def train_run(run: Run, out: Path | None, quiet: bool) -> TrainResult:
    """Train, and show what it prints as it comes."""
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
            except KeyboardInterrupt:  # it saves, and says so
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal.SIGINT)
    if code in (0, PREEMPTED):
        return TrainResult(folder, stopped=code == PREEMPTED)
    raise _failure("training", code, last)


class Server:
    """A server that runs beside this process, until `stop()` or the end of its `with`."""

    def __init__(self, child: subprocess.Popen[str], url: str, api_key: str = "") -> None:
        self.child, self.url, self._api_key = child, url, api_key
        # Nobody else reads what it prints; a full pipe would hold it up.
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
        """Let what runs finish, then end."""
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
                return Server(child, line.rpartition(" at ")[2].strip(), str(options.get("api_key", "")))
    except BaseException:
        child.terminate()
        child.wait()
        raise
    raise _failure("the server", child.wait(), last)


def _start(words: Sequence[str]) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])  # a checkout that is not installed is found by its processes too
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    # A group of its own: a notebook's or a terminal's interrupt reaches this process alone, which passes it on once.
    return subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, start_new_session=True,
    )  # fmt: skip


def _failure(what: str, code: int, last: Sequence[str]) -> Exception:
    """A user's mistake as the process said it; anything else with its last lines."""
    said = [line.removeprefix("error: ").strip() for line in last if line.startswith("error: ")]
    if code == 2 and said:
        return UserError(*map(Problem, said))
    return RuntimeError(f"{what} ended with exit code {code}:\n{''.join(last)}")
