"""The clock of a chip at its limit of power: what it draws is the limit, more rest is never slower, and it is what was measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.hardware import (
    find_chip,
    gemm_constants,
    gemm_seconds,
    grouped_gemm_seconds,
    grouped_gradient_seconds,
)
from shardwise.hardware.power import TRAINS, Boost, power_of, slowed

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


def test_gemms_are_those_of_a_chip_that_trains_without_pause() -> None:
    factors = slowed(find_chip("h200"), TRAINS, load=1.0)
    assert factors["matmul"] == pytest.approx(1.0, rel=1e-6)
    assert 1.0 < factors["memory"] < 1.05 < factors["attention"] < 1.2  # it follows the clock, the memory does not
    assert slowed(find_chip("h100"), TRAINS) == slowed(find_chip("h200"), TRAINS)
    assert slowed(find_chip("a100"), {"matmul": 1.0, "attention": 0.0, "memory": 0.0}) == dict.fromkeys(TRAINS, 1.0)


def test_gemms_that_draw_more_lower_the_clock() -> None:
    power = power_of(find_chip("h200"))
    assert power is not None
    clocks = [float(power.clock({kind: 0.8, "memory": 0.2}, load=1.0)) for kind in ("hot", "matmul", "attention")]
    assert clocks == sorted(clocks)
    assert power.slower("matmul", 1.0) == power.slower("attention", 1.0) == 1.0


def test_behind_a_rest_a_chip_computes_faster_for_a_while() -> None:
    power = power_of(find_chip("h200"))
    assert power is not None
    boost = Boost(power)
    assert boost.compute(0.01) == pytest.approx(0.01 / boost.gain)
    assert boost.compute(1.0) == pytest.approx(1.0 - (power.boost - 0.01 / boost.gain) * (boost.gain - 1.0))
    assert boost.compute(1.0) == 1.0
    boost.rest(0.01, power.watts["memory"])
    reading = 0.01 - boost.compute(0.01)
    boost.rest(0.01)
    assert 0.0 < reading < 0.01 - boost.compute(0.01)  # what reads draws power too
    boost.rest(10.0)
    assert boost.left == power.boost


def test_a_chip_that_rests_as_much_as_its_limit_asks_stays_at_its_highest_clock() -> None:
    power = power_of(find_chip("h200"))
    assert power is not None
    boost, share = Boost(power), (power.limit - power.idle) / power.watts["matmul"]
    for _ in range(1000):
        assert boost.compute(0.003 * boost.gain) == pytest.approx(0.003)
        boost.rest(0.003 * (1 - share) / share)
    assert power.clock({"matmul": 1.0}, load=0.999 * share) == 1.0


def test_a_large_gemm_has_no_droop_where_the_clock_is_planned() -> None:
    assert gemm_constants(find_chip("h200"), "bfloat16").droop == 0.0
    assert gemm_constants(find_chip("h200").altered(power_w=500), "bfloat16").droop > 0.0


def test_the_clock_is_what_was_measured() -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    power = power_of(find_chip("h200"))
    assert power is not None
    kinds = {"matmul": "matmul", "experts": "hot", "fp8": "hot", "attention": "attention", "memory": "memory"}
    for row in measured["clock"]:
        if row.get("pause_ms", 11) > 10:
            continue
        clock = row["mhz"] / measured["most_mhz"]
        alone = {kinds[kind]: ms / power.slower(kinds[kind], clock) for kind, ms in row["round_ms"].items()}
        # Three chips: one draws up to 5% more than another, at the same limit.
        assert float(power.clock(alone, load=row["load"])) == pytest.approx(clock, rel=0.05), row["work"]


def test_kernels_behind_rests_are_as_measured() -> None:
    """GEMMs of layers and experts by themselves, which is how the plan's kernels are meant."""
    chip, off = find_chip("h200"), dict[str, list[float]]()
    for row in json.loads(MEASURED.read_text(encoding="utf-8"))["cool"]:
        if row["kind"] == "gemm":
            planned = gemm_seconds(chip, row["m"], row["n"], row["k"])
        elif row["kind"] == "grouped" and row["layout"] == "NT":
            planned = grouped_gradient_seconds(chip, row["tokens"], row["n"], row["k"], row["experts"])
        elif row["kind"] == "grouped":
            inner, outer = (row["k"], row["n"]) if row["layout"] == "TN" else (row["n"], row["k"])
            planned = grouped_gemm_seconds(chip, row["tokens"], outer, inner, row["experts"])
        else:
            exact = 1.0 if row["fast"] else gemm_constants(chip, "fp8").exact
            planned = gemm_seconds(chip, row["m"], row["n"], row["k"], "fp8") / exact
        off.setdefault(row["kind"], []).append(abs(float(planned) / row["seconds"] - 1))
    medians = {kind: statistics.median(each) for kind, each in off.items()}
    assert medians["gemm"] < 0.02
    assert medians["grouped"] < 0.04
    assert medians["fp8"] < 0.04
