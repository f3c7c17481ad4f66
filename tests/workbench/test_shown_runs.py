"""What the page shows is what `shardwise plan --json` prints, and every control is turned by mouse and by keys."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from chromium import CHROMIUM, browser
from random_runs import BASES, KEYS, campaign, covering, drawn_changes, drawn_value
from shown_runs import compared, opened

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


def test_every_control_is_turned_and_what_is_shown_is_what_is_planned(pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.option.seed
    source = random.Random(seed)
    runs = [*((each, True) for each in covering(source, 8)), (drawn_changes(source), False)]
    with browser() as page, opened(source.choice(sorted(BASES)), page) as bench:
        assert compared(bench, {}, str(seed), look=True) == "planned"
        for at, (changes, anew) in enumerate(runs):
            assert compared(bench, changes, f"{seed} {at}", at == 8, anew) in ("planned", "refused"), changes
        for again in range(9):  # a number that was drawn as it stood was not turned
            left = {key: drawn_value(source, KEYS[key]) for key in sorted(set(KEYS) - bench.touched)}
            if left:
                assert compared(bench, left, f"{seed} left {again}", False, True) in ("planned", "refused"), left
        assert set(KEYS) == bench.touched


@pytest.mark.large(
    "three hundred runs of every kind on ten pages; the small tier turns every control and one run on one"
)
def test_three_hundred_runs_are_shown_as_planned() -> None:
    runs, said = campaign(7, 300), Counter[str]()
    with browser() as page:
        for base in BASES:
            with opened(base, page) as bench:
                for at, changes in ((at, changes) for at, (name, changes) in enumerate(runs) if name == base):
                    found = compared(bench, changes, f"7 {at}", look=at % 5 == 0)
                    assert found in ("planned", "refused"), (at, changes)
                    said[found] += 1
    assert said["planned"] > 100
    assert said["refused"] > 30
