"""Progress of a run for people: a live panel on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shardwise.report.words import clock

BARS = "▁▂▃▄▅▆▇█"
LINE_SECONDS = 5.0


def sparkline(values: list[float], width: int) -> str:
    """A text chart of values over time, newest at the right; each column is the mean of its share of the values."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    columns = min(width, len(finite))
    edges = [round(i * len(finite) / columns) for i in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(BARS[int((m - low) / (high - low or 1) * (len(BARS) - 1))] for m in means)


@dataclass
class Progress:
    """The values displayed for one step."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    mfu: float
    memory: int
    seconds_left: float
    reward: float | None = None
    """The mean reward of the step's answers, if the run learns from its own answers."""
    measured: dict[str, float] = field(default_factory=dict)
    """The objective's metrics."""

    def parts(self) -> dict[str, str]:
        """Label to text, in display order."""
        worth = {} if self.reward is None else {"reward": f"{self.reward:.3f}"}
        return {
            "step": f"{self.step:>{len(str(self.steps))}}/{self.steps}",
            **worth,
            "loss": f"{self.loss:.4f}",
            **{name.replace("_", " "): f"{value:.4f}" for name, value in self.measured.items()},
            "grad norm": f"{self.grad_norm:.3f}",
            "lr": f"{self.learning_rate:.2e}",
            "tokens/s": f"{self.tokens_per_s:,.0f}",
            "MFU": f"{self.mfu:.1%}",
            "memory": f"{self.memory / 2**30:.2f} GiB",
            "left": clock(self.seconds_left),
        }

    def line(self) -> str:
        """The step as one plain line."""
        return "  ".join(f"{label} {text}" for label, text in self.parts().items())


class PlainDisplay:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, quiet: bool = False) -> None:
        self.last = float("-inf")
        self.quiet = quiet

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def log(self, text: str) -> None:
        """Print a line. If the output is closed or its disk is full, the run continues without output."""
        if self.quiet:
            return
        try:
            print(text, flush=True)
        except OSError:
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # also for the flush at exit

    def show(self, progress: Progress) -> None:
        """Show the state after a step."""
        now = time.monotonic()
        if now - self.last >= LINE_SECONDS or progress.step == progress.steps:
            self.last = now
            self.log(progress.line())


class LiveDisplay(PlainDisplay):
    """A panel that is redrawn in place: progress, numbers, and the curve of the loss or of the reward."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self.console = Console()
        self.live = Live(console=self.console, refresh_per_second=4, transient=False)
        self.losses: list[float] = []

    def __enter__(self) -> LiveDisplay:
        self.live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.live.__exit__(*exception)

    def log(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def show(self, progress: Progress) -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self.losses.append(progress.loss if progress.reward is None else progress.reward)
        parts = progress.parts()
        grid = Table.grid(expand=True, padding=(0, 2))
        for _ in parts:
            grid.add_column(justify="left")
        grid.add_row(*(Text(label, style="dim") for label in parts))
        grid.add_row(*(Text(text, style="bold") for text in parts.values()))
        curve = Text(sparkline(self.losses, max(10, self.console.width - 8)), style="cyan")
        bar = ProgressBar(total=progress.steps, completed=progress.step)
        self.live.update(Panel(Group(grid, bar, curve), title="training", border_style="dim"))


def make_display(quiet: bool = False) -> PlainDisplay:
    """The live panel on a terminal, lines elsewhere, nothing when `quiet`."""
    return LiveDisplay() if sys.stdout.isatty() and not quiet else PlainDisplay(quiet)
