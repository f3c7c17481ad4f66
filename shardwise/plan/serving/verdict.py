"""Compares a measured load with its plan, quantity by quantity.

Counts must agree: requests and tokens always; steps, preemptions and pages where each client waits for its response, since then the
schedule does not depend on time. Memory and the size of the page pool must agree within 1%. Times are compared with the plan's
interval, and fail the verdict only on request.
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
    """A planned and measured load."""

    plan: ServingPlan
    measured: ServedLoad

    @property
    def differences(self) -> list[Difference]:
        """Every quantity that both have, the planned value first."""
        return compare_loads(self.plan.served, self.measured)

    def tolerance(self, time: float | None = None) -> Mapping[str, float]:
        """Allowed relative difference by account; infinite where it is only shown."""
        serve = self.plan.run.serve
        # When requests arrive at a rate, steps depend on time; with speculation, on which draft tokens are accepted.
        counted = math.inf if serve.rate or serve.speculate != "none" else 0.0
        timed = math.inf if time is None else time
        return {"load": 0.0, "engine": counted, "pool": 0.01, "memory": 0.01, **dict.fromkeys(TIMED, timed)}

    def agrees(self, time: float | None = None) -> bool:
        """Whether the load ran as planned."""
        allowed = self.tolerance(time)
        return all(abs(each.relative) <= allowed[each.account] for each in self.differences)

    def within(self, difference: Difference) -> bool | None:
        """Whether a time is inside the plan's interval; None for a quantity that is not a time."""
        if difference.account not in TIMED or not (difference.first > 0 and difference.second > 0):
            return None
        return abs(math.log(difference.second / difference.first)) <= math.log1p(self.plan.facts.error)

    def notes(self) -> list[str]:
        """Notes to print below the table."""
        timed = [inside for each in self.differences if (inside := self.within(each)) is not None]
        share, facts = self.plan.facts.error, self.plan.facts
        return [
            f"steps were simulated with times {facts.origin}",
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
    """The load from the output of `shardwise load --json`, or from the `run` key of `verify --json`."""
    numbers = ("requests", "failed", "input_tokens", "output_tokens", "output_tokens_per_s")
    points = [f"p{share}" for share in SHARES]
    known = isinstance(content, dict)
    known = known and all(isinstance(content.get(name), int | float) for name in numbers)
    known = known and all(isinstance(content.get(name), dict) and set(points) <= set(content[name]) for name in TIMES)
    if not known:
        raise UserError(f"{where} is not what `shardwise load --json` prints of a load")
    return ServedLoad(content, content.get("engine") or {}, content.get("memory") or {})
