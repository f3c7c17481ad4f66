"""The results of the verbs. A result prints itself on a terminal, shows its page in a notebook, and converts to a pandas frame or
JSON."""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.ledger import Memory, Traffic
from shardwise.run.problems import UserError, as_path

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType

    from shardwise.cli.trace.read import Explained
    from shardwise.plan.plan import Plan
    from shardwise.plan.search import SearchResult
    from shardwise.plan.serving.plan import ServingPlan
    from shardwise.run import PlannedRun, Run
    from shardwise.trace.answers import Explanation

HEIGHT = 560
"""Height of a page in a notebook, in pixels; it scrolls."""


class Result(ABC):
    """The interface of all results."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, as the command prints it with `--json`."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the frame that `to_frame` makes."""

    @abstractmethod
    def page(self) -> str:
        """An HTML page that works offline."""

    @abstractmethod
    def _shown(self) -> Sequence[RenderableType]:
        """The parts that a terminal shows."""

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict())

    def to_frame(self) -> pandas.DataFrame:
        """A pandas frame; needs pandas to be installed."""
        return frame(self.rows())

    def save(self, path: str | Path) -> None:
        """Write it to a file: .html is the page, anything else JSON."""
        file = as_path(path)
        file.write_text(self.page() if file.suffix in (".html", ".htm") else self.to_json(), encoding="utf-8")

    def __repr__(self) -> str:
        return printed(self._shown())

    def _repr_html_(self) -> str:
        return framed(self.page())


def frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Rows as a pandas frame."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise UserError("to_frame() needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(rows)


def printed(parts: Sequence[RenderableType]) -> str:
    """The text that a terminal without colours would show."""
    from shardwise.cli.machinery.terminal import print_parts
    from shardwise.report.terminal import Console

    text = io.StringIO()
    console = Console(file=text, width=100, color_system=None)
    print_parts(console, parts)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def framed(page: str) -> str:
    """A page inside another, with its style and script kept separate."""
    return f'<iframe srcdoc="{escape(page)}" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'


class PlanResult(Result):
    """The prediction for a training run. `record` is the planner's own `Plan`."""

    def __init__(self, record: Plan, planned: PlannedRun, next_change: str = "") -> None:
        self.record, self.planned, self.next_change = record, planned, next_change

    @property
    def run(self) -> Run:
        """The run, with its layout."""
        return self.record.run

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.record.fits

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.record.account.step_seconds

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that contains the step's seconds in 8 of 10 cases."""
        return self.record.low, self.record.high

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.record.account.tokens_per_second

    @property
    def mfu(self) -> float:
        """Model FLOPs as a fraction of the peak; `to_dict()["flops_convention"]` defines what is counted."""
        return self.record.mfu

    @property
    def memory(self) -> Memory:
        """Peak bytes by owner, of the fullest rank of each pipeline rank."""
        return self.record.account.memory

    @property
    def traffic(self) -> Traffic:
        """Bytes that a rank sends in a step, by axis."""
        return self.record.account.traffic

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step by activity."""
        return dict(self.record.account.breakdown)

    @property
    def usd(self) -> float:
        """Cost of the whole job."""
        return self.record.cost.usd

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons why the prediction is less certain, and keys that were not set."""
        return (*filter(None, [self.planned.sentence()]), *self.record.notes)

    def to_dict(self) -> dict[str, Any]:
        from shardwise.cli.planning.plan import plan_json

        return plan_json(self.record, None, self.planned.left_open)

    def rows(self) -> list[dict[str, Any]]:
        return [_row(self)]

    def page(self) -> str:
        from shardwise.cli.planning.plan import plan_page

        return plan_page(self.record, None, self.planned.sentence())

    def _shown(self) -> Sequence[RenderableType]:
        from shardwise.cli.planning.plan import all_figures
        from shardwise.report import terminal

        account = self.record.account
        parts = [terminal.key_figures(all_figures(self.record, None)), terminal.memory_bars(account.memory)]
        parts.append(terminal.breakdown_bar(account))
        return [*parts, terminal.notes(self.notes)] if self.notes else parts


def _row(plan: PlanResult) -> dict[str, Any]:
    """A plan as one row: the sizes of its layout and the figures by which layouts are compared."""
    values = plan.record.as_dict()
    figures = {key: values[key] for key in ("devices", "fits", "step_seconds", "step_seconds_low", "step_seconds_high")}
    figures |= {key: values[key] for key in ("tokens_per_s", "mfu")}
    return {**values["layout"], **figures, "memory_peak": values["memory"]["peak"], "usd": values["cost"]["usd"],
            "binds": values["binds"], "next_change": plan.next_change}  # fmt: skip


class SearchOutcome(Result):
    """The best layouts of a run, best first: a sequence of plans."""

    def __init__(self, record: SearchResult, planned: PlannedRun) -> None:
        self.record, self.planned = record, planned

    @cached_property
    def ranking(self) -> list[PlanResult]:
        """The plans, best first, each with the gain of the best change of one key."""
        both = zip(self.record.ranking, self.record.next_changes, strict=True)
        return [PlanResult(plan, self.planned, change) for plan, change in both]

    @property
    def best(self) -> PlanResult:
        """The best plan."""
        return self.ranking[0]

    @cached_property
    def pareto(self) -> list[PlanResult]:
        """Layouts that no other beats in step time, memory and devices at once."""
        return [PlanResult(plan, self.planned) for plan in self.record.pareto]

    def __len__(self) -> int:
        return len(self.record.ranking)

    def __iter__(self) -> Iterator[PlanResult]:
        return iter(self.ranking)

    def __getitem__(self, at: int) -> PlanResult:
        return self.ranking[at]

    def to_dict(self) -> dict[str, Any]:
        from shardwise.cli.planning.plan import plan_json

        return plan_json(self.record.best, self.record, self.planned.left_open)

    def rows(self) -> list[dict[str, Any]]:
        return [_row(plan) for plan in self.ranking]

    def page(self) -> str:
        from shardwise.cli.planning.plan import plan_page

        return plan_page(self.record.best, self.record, self.planned.sentence())

    def _shown(self) -> Sequence[RenderableType]:
        from shardwise.plan.figures import LETTERS, ranking_columns, ranking_rows
        from shardwise.report import terminal

        record = self.record
        table = terminal.ranking_table(ranking_rows(record.ranking, record.next_changes), ranking_columns(record))
        return [table, terminal.notes([LETTERS, *self.best.notes])]


class LoadResult(Result):
    """The serving engine's predicted performance under a load. `record` is the planner's own `ServingPlan`."""

    def __init__(self, record: ServingPlan) -> None:
        self.record = record

    @property
    def run(self) -> Run:
        """The run, with its layout."""
        return self.record.run

    @property
    def holds(self) -> bool:
        """Whether requests are answered as fast as they arrive, within their limits."""
        return self.record.holds

    def to_dict(self) -> dict[str, Any]:
        return self.record.as_dict()

    def rows(self) -> list[dict[str, Any]]:
        found = self.to_dict()
        flat: dict[str, Any] = dict(found["layout"]) | {"holds": found["holds"]}
        flat |= {key: value for key, value in found.items() if isinstance(value, int | float)}
        flat |= {f"{key}_{name}": v for key in ("ttft_ms", "tpot_ms") for name, v in found[key].items()}
        return [flat | found["cost"]]

    def page(self) -> str:
        from shardwise.report.load_view import load_page

        return load_page(f"Plan of {self.run.name}", self.record.figures)

    def _shown(self) -> Sequence[RenderableType]:
        from shardwise.report import load_view, terminal

        return [terminal.key_figures(load_view.key_figures(self.record.figures.as_dict()))]


class TraceResult(Result):
    """A profile, explained. `answers` has the answer to every question; times are in nanoseconds."""

    def __init__(self, explained: Explained) -> None:
        self.explained = explained

    @property
    def answers(self) -> Explanation:
        """Every answer."""
        return self.explained.answers

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, on the slowest rank."""
        return self.answers.step_time / 1e9

    @property
    def findings(self) -> list[Any]:
        """The changes to make, most valuable first."""
        return list(self.answers.findings)

    def to_dict(self) -> dict[str, Any]:
        from shardwise.cli.trace.verb import as_json

        return as_json(self.explained)

    def rows(self) -> list[dict[str, Any]]:
        return [vars(kernel) for kernel in self.answers.kernels]

    def page(self) -> str:
        from shardwise.cli.trace.verb import trace_page

        return trace_page(self.explained, None, 10.0)

    def _shown(self) -> Sequence[RenderableType]:
        from shardwise.ledger import as_dict
        from shardwise.report import terminal_trace

        return list(terminal_trace.sections(as_dict(self.answers)))
