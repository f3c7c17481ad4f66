"""The next change of a layout: one that is slower or does not fit is never recommended without saying so first."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.ledger import Memory
from shardwise.plan.cost.job import GIB
from shardwise.plan.plan import plan
from shardwise.plan.search import search
from shardwise.plan.search.advice import _changed, change_that_fits, sentence
from shardwise.run import Run, run_from_dict
from shardwise.run.rules.check import broken_rules

TOLD = re.compile(
    r"(?P<wrong>does not fit|no faster|slower|does not fit and no faster|does not fit and slower)?(?:: )?"
    r"(?P<what>\w+ \S+ → .+?): (?:(?P<gain>[-+][\d.]+)%, )?needs (?P<need>[\d.]+) GiB(?:, (?P<missing>[\d.]+) GiB too many)?"
)
WRONG = ("does not fit", "no faster", "slower")


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
@pytest.mark.drawn(1)
def test_what_is_wrong_with_a_change_comes_first(run: Run) -> None:
    found = search(run, keep=10)
    for change in found.next_changes:
        told = TOLD.fullmatch(change)
        assert told, change
        wrong = told["wrong"] or ""
        assert ("does not fit" in wrong) == bool(told["missing"])
        assert ("no faster" in wrong) == (told["gain"] is None)
        assert ("slower" in wrong) == (float(told["gain"] or 1) < 0)
    # The fastest has no change that fits and is faster: the search would have found it.
    assert found.next_changes[0].startswith(WRONG)


@pytest.mark.drawn(group="searches")
def test_a_faster_layout_that_fits_is_recommended_before_one_that_does_not() -> None:
    found = search(auto("llama3-8b", 8, global_batch=128, seq_len=8192), keep=20)
    plain = [change for change in found.next_changes if not change.startswith(WRONG)]
    assert plain
    best = found.best.account.step_seconds
    for row, change in zip(found.ranking, found.next_changes, strict=True):
        if change in plain:  # it leads to a layout that is no faster than the best
            gain = float(change.split(": ")[1].split("%")[0])
            assert row.account.step_seconds / (1 + gain / 100) >= best * 0.9989


@pytest.mark.parametrize(
    ("gain", "need", "begins"),
    [
        (1.1, 60.0, "zero 3 → 1: +10.0%, needs 60.0 GiB"),
        (0.9, 60.0, "slower: zero 3 → 1: -10.0%, needs 60.0 GiB"),
        (1.00001, 60.0, "no faster: zero 3 → 1: needs 60.0 GiB"),
        (0.99999, 60.0, "no faster: zero 3 → 1: needs 60.0 GiB"),
        (1.1, 90.0, "does not fit: zero 3 → 1: +10.0%, needs 90.0 GiB, 10.0 GiB too many"),
        (0.9, 90.0, "does not fit and slower: zero 3 → 1: -10.0%, needs 90.0 GiB, 10.0 GiB too many"),
        (1.0, 90.0, "does not fit and no faster: zero 3 → 1: needs 90.0 GiB, 10.0 GiB too many"),
    ],
)
def test_the_words_of_a_change(gain: float, need: float, begins: str) -> None:
    assert sentence("zero 3 → 1", gain, Memory(({"parameters": need * GIB},), 80.0 * GIB)) == begins


GIVEN = dict(dtype="bfloat16", seq_len=8192, global_batch=128)


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (dict(shard=8), dict(microbatch=4)),
        (dict(replicate=8), dict(microbatch=1)),
        (dict(shard=4, pipeline=2, schedule="zb-h1"), dict(microbatch=2)),
        (dict(shard=8, recompute="attention"), dict(microbatch=8)),
    ],
    ids=str,
)
@pytest.mark.drawn(1)
def test_a_layout_that_does_not_fit_is_told_the_fastest_single_change_that_does(
    layout: dict[str, Any], train: dict[str, Any]
) -> None:
    run = run_from_dict(
        dict(model=dict(preset="llama3-8b"), layout=layout, train=GIVEN | train, cluster=dict(chip="h100"))
    )
    before = plan(run)
    assert not before.fits
    told = re.fullmatch(r"makes it fit: (\w+) \S+ → (\S+): ([-+][\d.]+)%, needs ([\d.]+) GiB", change_that_fits(run))
    assert told
    changed = dict(_changed(run))
    (after,) = (
        plan(one)
        for what, one in changed.items()
        if what.startswith(f"{told[1]} ") and what.endswith(f" {told[2]}") and plan(one).fits
    )
    assert after.fits
    assert f"{after.account.memory.peak / GIB:.1f}" == told[4]
    assert 100 * (before.account.step_seconds / after.account.step_seconds - 1) == pytest.approx(
        float(told[3]), abs=0.1
    )
    others = [plan(one) for one in changed.values() if not any(broken_rules(one))]
    assert after.account.step_seconds == min(one.account.step_seconds for one in others if one.fits)


def test_where_no_single_change_fits_the_search_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model.preset=llama3-405b", "--layout.shard=8", "--cluster.chip=h100"]
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["next_change"].startswith("of several keys: no single one makes it fit")
    assert main(words) == 1
    assert "--layout=auto finds layouts that do" in " ".join(capsys.readouterr().out.split())


def test_where_this_machine_is_too_small_a_cluster_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model.preset=llama3-405b", "--json"]) == 1
    advice = json.loads(capsys.readouterr().out)["next_change"]
    assert advice.startswith("of the cluster: this machine is too small")
    words = advice.partition(": --")[2].split(" --")
    assert main(["plan", "--model.preset=llama3-8b", *(f"--{word}" for word in words), "--keep", "1", "--json"]) == 0
