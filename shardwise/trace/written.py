"""The answers as JSON holds them, for programs: every record under its name, each answer for one rank, for all and with the spread
over ranks, and the numbers that follow from others (bandwidths, means, shares) beside those they follow from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shardwise.ledger import as_dict
from shardwise.trace.answers import AxisTime, Explanation, Moved, Spread, spread


def written(answers: Explanation) -> dict[str, Any]:
    """All answers; times in nanoseconds."""
    plain = as_dict(answers)
    axes: dict[str, dict[str, Any]] = {}
    for row in answers.axes:
        axes.setdefault(row.axis, {})[row.collective] = _axis(row)
    return plain | {
        "axes": axes,
        "idle": _table(answers.idle),
        "categories": _table(answers.categories),
        "kernels": [as_dict(row) | {"mean": row.mean, "spread": asdict(spread(row.ranks))} for row in answers.kernels],
        "modules": plain["modules"]
        | {
            "rows": [
                as_dict(row) | {"total": row.total, "spread": asdict(spread(row.ranks))} for row in answers.modules.rows
            ]
        },
        "launches": _table({rank: asdict(queue) for rank, queue in answers.launches.items()}),
        "pipelines": [as_dict(step) | {"bubble_share": step.share} for step in answers.pipelines],
    }


def _axis(row: AxisTime) -> dict[str, Any]:
    names = ("messages", "bytes", "time", "exposed", "wait")
    return {
        "group": row.group,
        "all": _moved(row.total),
        "ranks": {str(rank): _moved(moved) for rank, moved in row.ranks.items()},
        "spread": {name: asdict(spread({rank: getattr(m, name) for rank, m in row.ranks.items()})) for name in names},
    }


def _moved(moved: Moved) -> dict[str, float]:
    return asdict(moved) | {"bus_bandwidth": moved.bus_bandwidth, "algorithm_bandwidth": moved.algorithm_bandwidth}


def _table(ranks: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Numbers of each rank, and how each number spreads over them."""
    names = dict.fromkeys(name for numbers in ranks.values() for name in numbers)
    spreads: dict[str, Spread] = {
        name: spread({rank: numbers.get(name, 0) for rank, numbers in ranks.items()}) for name in names
    }
    return {
        "ranks": {str(rank): dict(numbers) for rank, numbers in ranks.items()},
        "spread": {name: asdict(one) for name, one in spreads.items()},
    }
