"""What a rank holds while it plays its list: activations live from the forward until the backward no longer needs them.

A backward in one piece frees everything. A split one frees a part after I and the rest after W, so what a zero-bubble
schedule costs lies between two counts: everything held until W, and nothing held after I.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardwise.schedules.actions import Schedule


def held(
    schedule: Schedule, whole: Sequence[float] | None = None, after_input: Sequence[float] | None = None
) -> tuple[tuple[float, ...], ...]:
    """What each rank holds after each of its actions.

    `whole[stage]` is what one microbatch keeps between F and B or I, and `after_input[stage]` what is left of it between
    I and W (by default all). By default each counts 1, and the result is a number of microbatch-stages.
    """
    whole = [1] * schedule.stages if whole is None else whole
    after_input = whole if after_input is None else after_input
    change = {
        "F": list(whole),
        "B": [-size for size in whole],
        "I": [left - size for size, left in zip(whole, after_input, strict=True)],
        "W": [-left for left in after_input],
    }
    return tuple(tuple(accumulate([change[kind][stage] for kind, stage, _ in actions])) for actions in schedule.ranks)


def high_water(
    schedule: Schedule, whole: Sequence[float] | None = None, after_input: Sequence[float] | None = None
) -> tuple[float, ...]:
    """The most each rank holds at any time; arguments as for `held`."""
    return tuple(max(levels, default=0) for levels in held(schedule, whole, after_input))
