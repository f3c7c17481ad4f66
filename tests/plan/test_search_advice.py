"""The next change of a layout: one that is slower or does not fit is never recommended without saying so first."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwise.ledger import Memory
from shardwise.plan.cost.job import GIB
from shardwise.plan.search import search
from shardwise.plan.search.advice import sentence
from shardwise.run import Run, run_from_dict

TOLD = re.compile(
    r"(?P<wrong>does not fit|not faster|does not fit and not faster)?(?:: )?(?P<what>\w+ \S+ → .+?): (?P<gain>[-+][\d.]+) %, "
    r"needs (?P<need>[\d.]+) GiB(?:, (?P<missing>[\d.]+) too many)?"
)


def auto(preset: str, nodes: int, layout: Any = "auto", **train: Any) -> Run:
    """A run on H100 whose layout is to be found."""
    train = dict(dtype="bfloat16") | train
    return run_from_dict(
        dict(model=dict(preset=preset), layout=layout, train=train, cluster=dict(chip="h100", nodes=nodes))
    )


@pytest.mark.parametrize(
    "run",
    [
        auto("llama3-8b", 1, global_batch=16, seq_len=8192),
        auto("llama3-8b", 8, global_batch=128, seq_len=8192),
        auto("mixtral-8x7b", 8, dict(auto=True, zero=1), global_batch=256, seq_len=4096, microbatch=1),
    ],
    ids=["one machine", "eight machines", "experts"],
)
def test_what_is_wrong_with_a_change_comes_first(run: Run) -> None:
    found = search(run, keep=10)
    for change in found.next_changes:
        told = TOLD.fullmatch(change)
        assert told, change
        wrong = told["wrong"] or ""
        assert ("does not fit" in wrong) == bool(told["missing"])
        assert ("not faster" in wrong) == (float(told["gain"]) <= 0)
    # The fastest has no change that fits and is faster: the search would have found it.
    assert found.next_changes[0].startswith(("does not fit", "not faster"))


def test_a_faster_layout_that_fits_is_recommended_before_one_that_does_not() -> None:
    found = search(auto("llama3-8b", 8, global_batch=128, seq_len=8192), keep=20)
    plain = [change for change in found.next_changes if not change.startswith(("does not fit", "not faster"))]
    assert plain
    best = found.best.account.step_seconds
    for row, change in zip(found.ranking, found.next_changes, strict=True):
        if change in plain:  # it leads to a layout that is no faster than the best
            gain = float(change.split(": ")[1].split(" %")[0])
            assert row.account.step_seconds / (1 + gain / 100) >= best * 0.9989


@pytest.mark.parametrize(
    ("gain", "need", "begins"),
    [
        (1.1, 60.0, "zero 3 → 1: +10.0 %, needs 60.0 GiB"),
        (0.9, 60.0, "not faster: zero 3 → 1: -10.0 %, needs 60.0 GiB"),
        (1.00001, 60.0, "not faster: zero 3 → 1: +0.0 %, needs 60.0 GiB"),
        (1.1, 90.0, "does not fit: zero 3 → 1: +10.0 %, needs 90.0 GiB, 10.0 too many"),
        (0.9, 90.0, "does not fit and not faster: zero 3 → 1: -10.0 %, needs 90.0 GiB, 10.0 too many"),
    ],
)
def test_the_words_of_a_change(gain: float, need: float, begins: str) -> None:
    assert sentence("zero 3 → 1", gain, Memory(({"parameters": need * GIB},), 80.0 * GIB)) == begins
