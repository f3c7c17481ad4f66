"""Figures of a load: how long clients waited and how much they got, as percentiles over requests. A load generator fills them from
its measurements, the planner from its simulation; so the two can be compared.

Time to first token (ttft) is from when a request was due to be sent to its first text; time per output token (tpot) is the mean gap
between a request's tokens after the first; e2e is the total time. Goodput counts only the requests that kept every limit
(DistServe, Zhong et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHARES = (50, 90, 99)
TOO_LONG = "longer than the engine can hold"
"""The error of a request that was never started."""


@dataclass(frozen=True)
class RequestTimes:
    """One request that was answered, in milliseconds."""

    due: float
    """Seconds from the start."""
    late: float
    ttft: float
    tpot: float | None
    """None for an answer of one token."""
    e2e: float
    input_tokens: int
    output_tokens: int
    gaps: tuple[float, ...] = ()
    """Times between the events of its answer."""


@dataclass(frozen=True)
class Limits:
    """The longest times allowed for a request, in milliseconds; infinite where not given."""

    ttft: float = math.inf
    tpot: float = math.inf

    def kept(self, made: RequestTimes) -> bool:
        """Whether a request stayed within them."""
        return made.ttft <= self.ttft and (made.tpot or 0.0) <= self.tpot

    @property
    def given(self) -> bool:
        """Whether any limit is set."""
        return min(self.ttft, self.tpot) < math.inf


@dataclass(frozen=True)
class LoadFigures:
    """All requests of a load."""

    made: tuple[RequestTimes, ...]
    requests: int
    seconds: float
    limits: Limits = Limits()
    errors: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The figures, as `shardwise load --json` prints them."""
        made, seconds, limits = self.made, self.seconds or 1e-9, self.limits
        output, prompt = sum(each.output_tokens for each in made), sum(each.input_tokens for each in made)
        kept = sum(limits.kept(each) for each in made)
        return {
            "requests": self.requests,
            "failed": self.requests - len(made),
            "errors": dict(self.errors),
            "seconds": seconds,
            "requests_per_s": len(made) / seconds,
            "input_tokens": prompt,
            "output_tokens": output,
            "output_tokens_per_s": output / seconds,
            "total_tokens_per_s": (prompt + output) / seconds,
            "ttft_ms": percentiles([each.ttft for each in made]),
            "tpot_ms": percentiles([each.tpot for each in made if each.tpot is not None]),
            "itl_ms": percentiles([gap for each in made for gap in each.gaps]),
            "e2e_ms": percentiles([each.e2e for each in made]),
            "late_ms": percentiles([each.late for each in made]),
            "limits_ms": {"ttft": _finite(limits.ttft), "tpot": _finite(limits.tpot)},
            "goodput_per_s": kept / seconds,
            "goodput_share": kept / self.requests if self.requests else 0.0,
        }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The mean and some percentiles, interpolated between the two nearest values; None where there is no value."""
    if not values:
        return {"mean": None, **{f"p{share}": None for share in SHARES}}
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered), **{f"p{share}": percentile(ordered, share) for share in SHARES}}


def percentile(ordered: Sequence[float], share: float) -> float:
    """A percentile of sorted values."""
    place = share / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _finite(limit: float) -> float | None:
    return limit if limit < math.inf else None
