"""The parts of the gallery: a table of a paper, with the planner's value next to each published figure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Line:
    """One published figure and its planned value."""

    label: str
    published: float
    planned: float
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.planned / self.published - 1


@dataclass(frozen=True)
class Exhibit:
    """One table of a paper."""

    title: str
    source: str
    unit: str
    lines: list[Line] = field(default_factory=list)
    said: str = ""

    @property
    def median(self) -> float:
        """The median of the absolute errors."""
        return statistics.median(abs(line.error) for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        lines = [vars(line) | {"error": line.error} for line in self.lines]
        return dict(title=self.title, source=self.source, unit=self.unit, said=self.said, lines=lines)
