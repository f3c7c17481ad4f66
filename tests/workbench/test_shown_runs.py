"""What the page shows is what `shardwise plan --json` prints, and every control is turned by mouse and by keys, some of them with
every commit."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from chromium import CHROMIUM, browser
from random_runs import BASES, KEYS, campaign, covering, drawn_changes, drawn_value
from shown_runs import compared, opened

PARTS = 20
"""In so many the controls are dealt out, by the seed of the commit; the small tier turns one of them."""
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.drawn(1)
def test_every_control_is_turned_and_what_is_shown_is_what_is_planned(part: int, pytestconfig: pytest.Config) -> None:
    """Every control is in one of the parts."""
    seed = pytestconfig.option.seed
    every = covering(random.Random(seed), 2 * PARTS)
    own, source = every[part::PARTS], random.Random(f"{seed} {part}")
    wanted = {key for changes in own for key in changes}
    runs = [*((each, True) for each in own), (drawn_changes(source), False)]
    with browser() as page, opened(source.choice(sorted(BASES)), page) as bench:
        assert compared(bench, {}, f"{seed} {part}", look=True) == "planned"
        for at, (changes, anew) in enumerate(runs):
            said = compared(bench, changes, f"{seed} {part} {at}", at == len(own), anew)
            assert said in ("planned", "refused"), (said, changes)
        for again in range(9):  # a number that was drawn as it stood was not turned
            left = {key: drawn_value(source, KEYS[key]) for key in sorted(wanted - bench.touched)}
            if left:
                said = compared(bench, left, f"{seed} {part} left {again}", False, True)
                assert said in ("planned", "refused"), (said, left)
        assert wanted <= bench.touched


def test_the_parts_have_every_control() -> None:
    assert {key for changes in covering(random.Random(7), 2 * PARTS) for key in changes} == set(KEYS)


@pytest.mark.large(
    "sixty runs of every kind on ten pages; the small tier turns some controls and one run on one", campaign=True
)
def test_sixty_runs_are_shown_as_planned() -> None:
    """Every fifth of those that `shown_runs.py` shows, which take half an hour."""
    runs, said = campaign(7, 300)[::5], Counter[str]()
    with browser() as page:
        for base in BASES:
            with opened(base, page) as bench:
                for at, changes in ((at, changes) for at, (name, changes) in enumerate(runs) if name == base):
                    found = compared(bench, changes, f"7 {at}", look=at % 5 == 0)
                    assert found in ("planned", "refused"), (at, changes)
                    said[found] += 1
    assert said["planned"] > 20
    assert said["refused"] > 5
