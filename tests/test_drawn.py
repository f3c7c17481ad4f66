"""What the small tier draws of a test's cases: some, others with another seed, each value that is asked for."""

from __future__ import annotations

from drawing import GROUPS, cases_not_drawn, cases_not_shared


class Case:
    """As much of a test as the draw asks for."""

    def __init__(self, name: str, mark: tuple[object, ...] | None, group: str = "", **params: object) -> None:
        self.nodeid, self.mark, self.group = f"file.py::{name}[{params}]", mark, group
        self.callspec = type("Spec", (), {"params": params})

    def get_closest_marker(self, name: str) -> object:
        return (
            type("Mark", (), {"args": self.mark, "kwargs": {"group": self.group} if self.group else {}})
            if self.mark is not None and name == "drawn"
            else None
        )


def drawn(cases: list[Case], seed: int) -> list[Case]:
    left_out = cases_not_drawn(cases, seed)  # type: ignore[arg-type]
    return [case for case in cases if case not in left_out]


def test_some_are_drawn_and_all_come_up() -> None:
    cases = [Case("a", (3,), number=n) for n in range(10)] + [Case("b", None, number=n) for n in range(4)]
    taken = [drawn(cases, seed) for seed in range(40)]
    assert all(len(each) == 3 + 4 for each in taken)
    assert {case for each in taken for case in each} == set(cases)
    assert taken[7] == drawn(cases, 7)


def test_each_value_that_is_asked_for_is_among_them() -> None:
    cases = [Case("a", (4, "family"), family=family, number=n) for family in "xyz" for n in range(5)]
    for seed in range(20):
        taken = drawn(cases, seed)
        assert len(taken) == 4
        assert {case.callspec.params["family"] for case in taken} == set("xyz")  # type: ignore[attr-defined]
    more = [Case("a", (1, "family"), family=family) for family in "xyz"]
    assert len(drawn(more, 0)) == 3


def test_tests_of_a_group_are_drawn_together() -> None:
    cases = [Case(name, (), group="kernels", number=n) for name in "ab" for n in range(3)]
    assert {len(drawn(cases, seed)) for seed in range(10)} == {GROUPS["kernels"]}


class LargeCase(Case):
    """A test that only the large tier has."""

    def get_closest_marker(self, name: str) -> object:
        if name != "large":
            return None
        return type("Mark", (), {"args": ("something",), "kwargs": {"campaign": self.mark is not None}})


def test_a_share_keeps_what_the_small_tier_draws_and_the_rest_comes_up() -> None:
    small = [Case("a", (3,), number=n) for n in range(20)]
    large = [LargeCase(name, None, layout=n) for n in range(20) for name in "bc"]
    *campaigns, single = (LargeCase(name, () if name < "h" else None) for name in "defgh")
    for test in (*campaigns, single):
        test.nodeid = test.nodeid.partition("[")[0]
    cases = [*small, *large, *campaigns, single]
    taken = []
    for seed in range(40):
        left_out = cases_not_shared(cases, seed, 0.4)  # type: ignore[arg-type]
        taken.append({case for case in cases if case not in left_out})
        assert set(drawn(small, seed)) <= taken[-1]
        assert single in taken[-1]
        assert len(taken[-1] & set(campaigns)) == 1
        kept = {case.nodeid.partition("[")[2]: case in taken[-1] for case in large}
        assert all(kept[case.nodeid.partition("[")[2]] == (case in taken[-1]) for case in large), (
            "a layout's tests part"
        )
    assert set.union(*taken) == set(cases)
    assert 0.2 < sum(len(each) for each in taken) / (40 * len(cases)) < 0.6
