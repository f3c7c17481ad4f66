"""The clock of a chip at its limit of power, and how much longer its kernels take for it.

GEMMs, attention and passes over memory each draw so many watts at the highest clock; GEMMs of experts and in 8 bits draw more than
others. Where these, averaged over the time, exceed the limit, the chip lowers its clock for all of them, until they no longer do:

    idle + sum over kinds of watts x clock^exponent x share of the time = limit

Attention takes as much longer. GEMMs do too once the clock is some 10% below the highest; above, something else bounds them, as
it bounds passes over memory. So a chip that does nothing but GEMMs makes 15% fewer of them in a second of computing than one that
rests half of the time. Pauses count up to some 30 ms: the limit is one of the mean over that time.

Times of GEMMs and attention (`gemm.py`, `attention.py`) are those at the highest clock, of calls behind rests. The factors are
those beside a GEMM on a chip that trains without pause (`TRAINS`), so that constants mean the same as on chips of which nobody has
measured the power. `efficiency.json` has the fitted ones; `benchmarks/gpu/clock.py` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from shardwise.hardware.chips import Chip, find_chip
from shardwise.hardware.efficiency import constants

TRAINS = {"matmul": 0.75, "attention": 0.1, "memory": 0.15}
"""Shares of the time of kernels of each kind in a training step of a dense model, at the highest clock."""
ROUNDS = 4
"""A lower clock lets kernels run longer, at less power. Each round of the fixed point leaves some 5% of the error."""


@dataclass(frozen=True)
class Power:
    """Fitted constants of a chip."""

    limit: float  # W that the chip holds, a little below the board's limit
    idle: float  # W of a chip at its highest clock that runs no kernel
    exponent: float  # of the clock in the power of a kernel
    watts: Mapping[str, float]  # beyond idle, of each kind of kernel at the highest clock
    bound: Mapping[str, float]  # share of the highest clock below which the clock bounds kernels of each kind
    sharpness: float  # how sharply it does
    boost: float  # s behind a rest until a chip that works without pause lowers its clock

    def slower(self, kind: str, clock: Any) -> Any:
        """How many times as long kernels of a kind take at a clock, a share of the highest."""
        bound, sharp = self.bound[kind], self.sharpness
        return ((1.0 + (bound / clock) ** sharp) / (1.0 + bound**sharp)) ** (1.0 / sharp)

    def clock(self, seconds: Mapping[str, Any], resting: Any = 0.0, load: Any = None) -> Any:
        """The clock of a chip that runs kernels of each kind for so many seconds, as they take at the highest clock, and then none
        for `resting` seconds; or, with `load`, runs them in that share of the time."""
        clock: Any = 1.0
        for _ in range(ROUNDS):
            now = {kind: value * self.slower(kind, clock) for kind, value in seconds.items()}
            busy = sum(now.values())
            whole = busy + resting if load is None else busy / load
            drawn = sum(self.watts[kind] * value for kind, value in now.items())
            allowed = (self.limit - self.idle) * whole / np.maximum(drawn, 1e-30)
            clock = np.where(drawn > 0, np.minimum(1.0, allowed ** (1.0 / self.exponent)), 1.0)
        return clock


@cache
def power_of(chip: Chip) -> Power | None:
    """The constants of a chip, or None; none for one with another limit than the chip whose constants they are."""
    found = constants("power", chip)
    same = found and chip.power == find_chip(chip.lender or chip.name).power and chip.clock == 1.0
    return Power(**found["constants"]) if same else None


class Boost:
    """How long a chip may still compute at its highest clock, as time goes on: behind a rest for some time, which what draws less
    than the limit gives back. It starts behind a long rest."""

    def __init__(self, power: Power) -> None:
        self.power = power
        self.left = power.boost
        clock = power.clock({"matmul": 1.0}, load=1.0)
        self.gain = float(power.slower("matmul", clock))
        self.beyond = power.idle + power.watts["matmul"] - power.limit

    def rest(self, seconds: float, watts: float = 0.0) -> None:
        """Time goes on while kernels draw so many watts beside those of an idle chip."""
        spare = self.power.limit - self.power.idle - watts
        self.left = min(self.power.boost, self.left + seconds * max(spare, 0.0) / self.beyond)

    def compute(self, seconds: float) -> float:
        """The seconds that GEMMs take which take so many without pause."""
        fast = min(self.left, seconds / self.gain)
        self.left -= fast
        return fast + max(seconds - fast * self.gain, 0.0)


@cache
def usual(chip: Chip) -> float:
    """How many times as long as at the highest clock GEMMs take on a chip that trains without pause."""
    power = power_of(chip)
    return 1.0 if power is None else float(power.slower("matmul", power.clock(TRAINS, load=1.0)))


def slowed(chip: Chip, seconds: Mapping[str, Any], resting: Any = 0.0, load: Any = None) -> dict[str, Any]:
    """The factor on the time of kernels of each kind on a chip that runs them for so many seconds, and then none for `resting`
    seconds; `load` is the share of the time in which any runs, where that is known."""
    power = power_of(chip)
    if power is None:
        return dict.fromkeys(seconds, 1.0)
    clock = power.clock(seconds, resting, load)
    return {kind: power.slower(kind, clock) / (1.0 if kind == "memory" else usual(chip)) for kind in seconds}


def slowed_in(chip: Chip, took: Mapping[str, float], load: float) -> dict[str, float]:
    """The same factors of kernels that took so many seconds, in a run in which any ran for a share `load` of the time."""
    factors, alone = slowed(chip, took, load=load), took
    for _ in range(ROUNDS):
        alone = {
            kind: value / factors[kind] / (1.0 if kind == "memory" else usual(chip)) for kind, value in took.items()
        }
        factors = slowed(chip, alone, load=load)
    return {kind: float(factor) for kind, factor in factors.items()}
