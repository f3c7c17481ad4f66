"""A measured load beside the plan of it, quantity by quantity.

What is counted must agree: requests and tokens always, steps, preemptions and pages where clients wait for their answers, since
then time decides nothing. Memory and the size of the pool agree within 1%. Times are held against the plan's interval, and judged
only when asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.ledger import Difference
from shardwise.plan.serving.plan import ServingPlan
from shardwise.plan.serving.served import TIMES, ServedLoad, compare_loads
from shardwise.run import UserError
from shardwise.schedules.serving.figures import SHARES

TIMED = ("speed", "time")


@dataclass(frozen=True)
class LoadVerdict:
    """A load, planned and measured."""

    plan: ServingPlan
    measured: ServedLoad

    @property
    def differences(self) -> list[Difference]:
        """Every quantity of both, the plan's first."""
        return compare_loads(self.plan.served, self.measured)

    def tolerance(self, time: float | None = None) -> Mapping[str, float]:
        """Relative difference allowed by account; infinite where it is shown and not judged."""
        serve = self.plan.run.serve
        # When requests come by the clock, steps depend on it; and on which guesses are right.
        counted = math.inf if serve.rate or serve.speculate != "none" else 0.0
        timed = math.inf if time is None else time
        return {"load": 0.0, "engine": counted, "pool": 0.01, "memory": 0.01, **dict.fromkeys(TIMED, timed)}

    def agrees(self, time: float | None = None) -> bool:
        """Whether the load was as planned."""
        allowed = self.tolerance(time)
        return all(abs(each.relative) <= allowed[each.account] for each in self.differences)

    def within(self, difference: Difference) -> bool | None:
        """Whether a time is inside of the plan's interval; None of what is no time."""
        if difference.account not in TIMED or not (difference.first > 0 and difference.second > 0):
            return None
        return abs(math.log(difference.second / difference.first)) <= math.log1p(self.plan.facts.error)

    def notes(self) -> list[str]:
        """What to know beside the table."""
        timed = [inside for each in self.differences if (inside := self.within(each)) is not None]
        share, facts = self.plan.facts.error, self.plan.facts
        return [
            f"steps were played with facts {facts.origin}",
            f"{sum(timed)} of {len(timed)} times are within the plan's interval of {share:.0%}",
        ]

    def as_dict(self, time: float | None = None) -> dict[str, Any]:
        """For programs."""
        return {
            "agrees": self.agrees(time),
            "interval": self.plan.facts.error,
            "facts": self.plan.facts.origin,
            "differences": [
                {
                    "account": each.account, "name": each.name, "plan": each.first, "run": each.second,
                    "relative": each.relative if math.isfinite(each.relative) else None, "within": self.within(each),
                }
                for each in self.differences
            ],
            "plan": self.plan.as_dict(),
            "run": {**self.measured.figures, "engine": self.measured.engine, "memory": self.measured.memory},
        }  # fmt: skip


def load_from_json(content: Any, where: str) -> ServedLoad:
    """What `shardwise load --json` printed, or the `run` of what `verify --json` did."""
    numbers = ("requests", "failed", "input_tokens", "output_tokens", "output_tokens_per_s")
    points = [f"p{share}" for share in SHARES]
    known = isinstance(content, dict)
    known = known and all(isinstance(content.get(name), int | float) for name in numbers)
    known = known and all(isinstance(content.get(name), dict) and set(points) <= set(content[name]) for name in TIMES)
    if not known:
        raise UserError(f"{where} is not what `shardwise load --json` prints of a load")
    return ServedLoad(content, content.get("engine") or {}, content.get("memory") or {})
