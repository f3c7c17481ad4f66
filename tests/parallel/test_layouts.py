"""Every layout computes what one process computes, does what the plan says, and needs the memory it says: losses, gradient norms,
evaluation and final parameters in float64, where a bug cannot hide behind rounding; operations, messages and memory to the last.

The small tier finds a variant that breaks an axis: of a covering array, drawn anew for every commit, it takes the first layouts,
which have every axis, model, schedule, method, ZeRO stage and objective somewhere, half of the adapters and variants and a third of
the pairs of axes, others with every commit, and one of those that the array does not draw. The large tier takes all of it, random
layouts on up to eight ranks, and a list of edges, and so finds what needs three axes at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import layouts
import pytest
from covering import array_of
from observed import Observed
from parallel_pool import RankPool

EDGES, ADAPTERS = 1, 25
"""So many of the layouts that the array does not draw are in the small tier, and so many with an adapter in the large one, others
with every commit."""
LARGE = pytest.mark.large("three axes at once, eight ranks, and every axis and pair of axes by itself")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "observed" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    array, covering = array_of(metafunc.config)
    which: list[object] = [("array", number) for number in range(covering)]
    edges = range(len(layouts.SMALL_EDGES))
    some = edges if option("--large") else random.Random(option("--seed")).sample(edges, EDGES)
    which += [("small", number) for number in some]
    if option("--large"):
        more = [("array", number) for number in range(covering, len(array))]
        more += [("random", number) for number in range(option("--layouts"))]
        adapters = random.Random(option("--seed")).sample(range(len(layouts.ADAPTER_EDGES)), ADAPTERS)
        more += [("adapter", number) for number in adapters]
        more += [("large", number) for number in range(len(layouts.LARGE_EDGES))]
        which += [pytest.param(each, marks=LARGE) for each in more]
    metafunc.parametrize("observed", which, ids=lambda each: f"{each[0]} {each[1]}", indirect=True, scope="module")


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest, ranks: RankPool) -> Iterator[Observed]:
    """One run of ranks, which all tests of a layout read."""
    kind, number = request.param
    seed = request.config.getoption("--seed")
    if kind == "array":
        array, _ = array_of(request.config)
        drawn = array[number]
    elif kind == "random":
        drawn = layouts.random_layout(seed, number)
    else:
        edges = dict(small=layouts.SMALL_EDGES, adapter=layouts.ADAPTER_EDGES, large=layouts.LARGE_EDGES)
        drawn = edges[kind][number]
    return Observed(ranks, *drawn)


def test_it_begins_as_one_process(observed: Observed) -> None:
    observed.assert_begins_as_one_process()


def test_it_trains_as_one_process(observed: Observed) -> None:
    if observed.run.train.dtype != "float64":
        pytest.skip("rounding is compared in test_equality.py")
    observed.assert_trains_as_one_process()


def test_what_is_frozen_stays(observed: Observed) -> None:
    observed.assert_trains_what_is_not_frozen()


def test_its_schedule_runs_as_listed(observed: Observed) -> None:
    observed.assert_follows_its_schedule()


def test_it_computes_and_sends_as_planned(observed: Observed) -> None:
    observed.assert_computes_and_sends_as_planned()


def test_its_messages_are_as_planned(observed: Observed) -> None:
    observed.assert_messages_are_as_planned()


def test_it_holds_what_the_plan_says(observed: Observed) -> None:
    observed.assert_holds_what_the_plan_says()
