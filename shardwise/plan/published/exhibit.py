"""What the gallery is made of: a table of a paper, with what the planner says beside each figure of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Line:
    """One figure."""

    label: str
    published: float
    planned: float
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float:
        """Relative, with its sign."""
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
        """Of the errors without their sign."""
        return statistics.median(abs(line.error) for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        lines = [vars(line) | {"error": line.error} for line in self.lines]
        return dict(title=self.title, source=self.source, unit=self.unit, said=self.said, lines=lines)
