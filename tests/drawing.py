"""Which cases of a test marked `drawn` the small tier takes: as the seed of the commit has it, so that each comes up in time.

`drawn(n)` takes n of its cases. `drawn(n, "family")` takes n or more, so that each value of the parameter `family` is among them.
`drawn(group="kernels")` takes as many cases of the tests of that group as `GROUPS` says, of each test one before any has two; those
of one `unit`, which share what takes long, are one.
"""

from __future__ import annotations

import itertools
import random

import pytest

GROUPS = {
    "broken traces": 1,
    "browser": 2,
    "commands": 1,
    "compiled": 1,
    "crashes": 1,
    "dry ranks": 3,
    "fp8": 1,
    "grpo on ranks": 3,
    "kernels": 1,
    "laws": 1,
    "memory": 1,
    "outer": 1,
    "pages": 2,
    "pages with ranks": 1,
    "plans that serve": 2,
    "preparation": 2,
    "profiles": 2,
    "published": 2,
    "ranks that serve": 2,
    "resharding": 3,
    "rounding": 1,
    "searches": 2,
    "servers": 1,
    "soaks": 1,
    "whole runs": 4,
}
"""How many of its tests the small tier takes of a group: tests that start ranks by the command or disturb them (a run that suffers
every kind of fault is always there), dry ranks beside their plan, memory and profiles of what other tests count, kernels in the
interpreter, fits of laws, searches of large jobs, pages in a browser, saves that die at every operation, …"""


def cases_not_drawn(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """What the small tier leaves out."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            groups.setdefault(mark.kwargs.get("group", item.nodeid.partition("[")[0]), []).append(item)
    left_out: set[pytest.Item] = set()
    for name, cases in groups.items():
        mark = cases[0].get_closest_marker("drawn")
        assert mark is not None
        count, *each = mark.args or [GROUPS[name]]
        chance = random.Random(f"{seed} {name}")
        if "group" in mark.kwargs:
            left_out |= set(cases) - some_of(cases, count, chance)
            continue
        chance.shuffle(cases)
        seen: set[tuple[str, str]] = set()
        first, more = [], []
        for case in cases:
            values = {(key, repr(case.callspec.params[key])) for key in each}  # type: ignore[attr-defined]
            (more if values <= seen else first).append(case)
            seen |= values
        left_out |= set(more[max(0, count - len(first)) :])
    return left_out


def cases_not_shared(items: list[pytest.Item], seed: int, share: float) -> set[pytest.Item]:
    """What the large tier leaves out where it takes a share: of the cases that the small tier would not draw, and of campaigns, of
    minutes each, so many, at least one. Cases of a file that have one name, the tests of a layout, stay together."""
    small = [item for item in items if not item.get_closest_marker("large")]
    extra = {item for item in items if item.get_closest_marker("large")} | cases_not_drawn(small, seed)
    left_out, campaigns = set(), []
    for item in items:
        if item not in extra:
            continue
        mark = item.get_closest_marker("large")
        path, _, case = item.nodeid.partition("[")
        if not case:
            campaigns += [item] if mark is not None and mark.kwargs.get("campaign") else []
        elif random.Random(f"{seed} {path.partition('::')[0]}[{case}").random() >= share:
            left_out.add(item)
    random.Random(f"{seed} campaigns").shuffle(campaigns)
    return left_out | set(campaigns[max(1, int(share * len(campaigns))) :])


def some_of(cases: list[pytest.Item], count: int, chance: random.Random) -> set[pytest.Item]:
    """So many of a group, from one test after another."""
    units: dict[str, list[pytest.Item]] = {}
    for case in cases:
        mark = case.get_closest_marker("drawn")
        assert mark is not None
        units.setdefault(mark.kwargs.get("unit", case.nodeid), []).append(case)
    tests: dict[str, list[str]] = {}
    for unit in units:
        tests.setdefault(unit.partition("[")[0], []).append(unit)
    turns = list(tests.values())
    chance.shuffle(turns)
    for own in turns:
        chance.shuffle(own)
    chosen = [unit for turn in itertools.zip_longest(*turns) for unit in turn if unit is not None]
    return {case for unit in chosen[:count] for case in units[unit]}
