"""The clock of a chip at its limit of power: what it draws is the limit, more rest is never slower, and it is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.hardware import find_chip
from shardwise.hardware.power import TRAINS, power_of, slowed

MEASURED = Path(__file__).parents[2] / "benchmarks" / "h200_kernels.json"
SECONDS = st.fixed_dictionaries({kind: st.floats(0.001, 1.0) for kind in TRAINS})


@given(SECONDS, st.floats(0.0, 3.0))
def test_what_a_chip_draws_is_at_most_the_limit(seconds: dict[str, float], resting: float) -> None:
    power = power_of(find_chip("h200"))
    assert power is not None
    clock = float(power.clock(seconds, resting))
    took = {kind: value * power.slower(kind, clock) for kind, value in seconds.items()}
    energy = sum(power.watts[kind] * value for kind, value in took.items()) * clock**power.exponent
    drawn = power.idle + energy / (sum(took.values()) + resting)
    assert drawn <= power.limit * 1.01
    assert clock == 1.0 or drawn == pytest.approx(power.limit, rel=0.01)


@given(SECONDS, st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_more_rest_is_never_slower(seconds: dict[str, float], some: float, more: float) -> None:
    chip = find_chip("h200")
    busy, idle = slowed(chip, seconds, some), slowed(chip, seconds, some + more)
    assert all(idle[kind] <= busy[kind] * (1 + 1e-9) for kind in TRAINS)
    load = slowed(chip, seconds, load=0.5)
    assert all(load[kind] <= slowed(chip, seconds, load=1.0)[kind] * (1 + 1e-9) for kind in TRAINS)


def test_times_are_those_of_a_chip_that_trains_without_pause() -> None:
    assert slowed(find_chip("h200"), TRAINS) == pytest.approx(dict.fromkeys(TRAINS, 1.0), rel=0.01)
    assert slowed(find_chip("h100"), TRAINS) == slowed(find_chip("h200"), TRAINS)
    assert slowed(find_chip("a100"), {"matmul": 1.0, "attention": 0.0, "memory": 0.0}) == dict.fromkeys(TRAINS, 1.0)


def test_the_clock_is_what_was_measured() -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    power = power_of(find_chip("h200"))
    assert power is not None
    for row in measured["clock"]:
        if row.get("pause_ms", 11) > 10:
            continue
        clock = row["mhz"] / measured["most_mhz"]
        alone = {kind: ms / power.slower(kind, clock) for kind, ms in row["round_ms"].items()}
        assert float(power.clock(alone, load=row["load"])) == pytest.approx(clock, rel=0.05), row["work"]
