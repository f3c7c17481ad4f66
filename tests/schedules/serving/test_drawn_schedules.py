"""Drawn schedules: whatever arrives, ends, forks or is preempted, and whenever, every chunk finds its past in its pages."""

from __future__ import annotations

from random import Random

import pytest
from drawn import Case, Life, draw_case
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return draw_case(lambda least, most: draw(st.integers(least, most)))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_drawn_schedule_computes_what_it_should(case: Case) -> None:
    Life(case).play()


def play(seed: int, count: int) -> None:
    for number in range(count):
        case = draw_case(Random(f"{seed} {number}").randint)
        try:
            Life(case).play()
        except Exception as error:
            error.add_note(f"schedule {number}: {case}")
            raise


def test_schedules_of_this_commit(pytestconfig: pytest.Config) -> None:
    play(pytestconfig.option.seed, 60)


@pytest.mark.large("what one schedule in thousands does: preemption, forks, drafts and windows at once", campaign=True)
def test_ten_thousand_schedules(pytestconfig: pytest.Config) -> None:
    play(pytestconfig.option.seed, 10_000)
