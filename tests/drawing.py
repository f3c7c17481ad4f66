"""Which cases of a test marked `drawn` the small tier takes: as the seed of the commit has it, so that each comes up in time.

`drawn(n)` takes n of its cases. `drawn(n, "family")` takes n or more, so that each value of the parameter `family` is among them.
`drawn(group="kernels")` takes as many of all cases of the tests of that group as `GROUPS` says.
"""

from __future__ import annotations

import random

import pytest

GROUPS = {
    "asynchronous": 1,
    "broken traces": 2,
    "browser": 2,
    "commands": 2,
    "crashes": 1,
    "dry ranks": 1,
    "fp8": 1,
    "kernels": 1,
    "laws": 1,
    "memory": 1,
    "outer": 1,
    "pages": 3,
    "pages with ranks": 1,
    "preparation": 3,
    "profiles": 2,
    "resharding": 2,
    "rounding": 1,
    "searches": 3,
    "servers": 1,
    "soaks": 1,
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
        random.Random(f"{seed} {name}").shuffle(cases)
        seen: set[tuple[str, str]] = set()
        first, more = [], []
        for case in cases:
            values = {(key, repr(case.callspec.params[key])) for key in each}  # type: ignore[attr-defined]
            (more if values <= seen else first).append(case)
            seen |= values
        left_out |= set(more[max(0, count - len(first)) :])
    return left_out
