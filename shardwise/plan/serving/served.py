"""A load and what the engine did to serve it. The planner's simulation and a measurement make the same record, so the two can be
compared like those of a training step (`ledger.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.ledger import Difference, differences
from shardwise.schedules.serving.figures import SHARES

TIMES = ("ttft_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True)
class ServedLoad:
    """A simulated or measured load. Unknown values are empty: a client sees no steps and no memory."""

    figures: Mapping[str, Any]
    """As `LoadFigures.as_dict` returns them and `shardwise load --json` prints them."""
    engine: Mapping[str, int] = field(default_factory=dict)
    """`steps`, `preemptions`, and the most sequences `running` and `pages` used at once."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes of the fullest device by owner, and how many `pages` its pool has."""

    def quantities(self) -> Iterator[tuple[str, str, float]]:
        """Every number as (account, name, value)."""
        for name in ("requests", "failed", "input_tokens", "output_tokens"):
            yield "load", name.replace("_", " "), self.figures[name]
        for name, value in self.engine.items():
            yield "engine", name, value
        for name, size in self.memory.items():
            yield "pool" if name == "pages" else "memory", name.replace("_", " "), size
        yield "speed", "output tokens/s", self.figures["output_tokens_per_s"]
        for name in TIMES:
            for share in SHARES:
                value = self.figures[name][f"p{share}"]
                if value is not None:
                    yield "time", f"{name.removesuffix('_ms')} p{share}", value / 1e3


def compare_loads(first: ServedLoad, second: ServedLoad) -> list[Difference]:
    """All quantities that both have, in the order of the first."""
    known = {(account, name) for account, name, _ in second.quantities()}
    return [each for each in differences(first.quantities(), second.quantities()) if (each.account, each.name) in known]
