"""What a search shows is what `plan` says of the same layout, for every row and for every number of devices asked for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from shardwise.plan.cost.job import GIB, job_of
from shardwise.plan.cost.memory import memory
from shardwise.plan.plan import plan
from shardwise.plan.search import search
from shardwise.plan.search.screen import Space
from shardwise.plan.trainer.memory import memory_of
from shardwise.run import Run, UserError, run_from_dict


def auto(preset: str, nodes: int, **keys: Any) -> Run:
    """A run whose layout is to be found, on H100."""
    train = dict(seq_len=4096, global_batch=256, microbatch=1, dtype="bfloat16") | keys
    return run_from_dict(
        dict(model=dict(preset=preset), layout="auto", train=train, cluster=dict(chip="h100", nodes=nodes))
    )


LARGE = pytest.mark.large("rows far down a long ranking, and a search that begins with nothing that fits")


@pytest.mark.parametrize(
    ("run", "keep"),
    [
        (auto("mixtral-8x7b", 8), 12),
        (auto("mixtral-8x22b", 16), 12),
        (auto("llama3-8b", 8, seq_len=8192, global_batch=128), 150),
    ],
    ids=["mixtral-8x7b", "mixtral-8x22b", "llama3-8b"],
)
@pytest.mark.drawn(group="searches")
def test_every_row_has_the_memory_of_its_plan(run: Run, keep: int) -> None:
    found = search(run, keep=keep)
    assert len(found.ranking) == keep  # others took the place of those that fell away
    for row in [*found.ranking, *found.pareto]:
        planned = plan(row.run)
        assert planned.fits
        assert planned.account.memory == row.account.memory
        assert planned.account.step_seconds == row.account.step_seconds
    assert not found.without


def test_the_next_change_needs_what_its_plan_says() -> None:
    found = search(auto("llama3-8b", 8, seq_len=8192, global_batch=128), keep=8)
    checked = 0
    for row, change in zip(found.ranking, found.next_changes, strict=True):
        told = re.search(r"(zero|recompute) \S+ → (\S+): .* needs ([\d.]+) GiB(?:, ([\d.]+) GiB too many)?", change)
        if told:
            key, value, need, missing = told.groups()
            words: dict[str, Any] = {key: int(value) if key == "zero" else value}
            space = plan(replace(row.run, layout=replace(row.run.layout, **words))).account.memory
            assert float(need) == pytest.approx(space.peak / GIB, abs=0.051)
            assert (missing is None) == space.fits
            checked += 1
    assert checked


def test_whole_experts_are_dealt_out() -> None:
    """One expert a rank over four ranks: each of them holds as much as the one that has it, and the estimate knows."""
    layout = dict(shard=32, pipeline=2, expert=8, zero=1)
    train = dict(seq_len=4096, global_batch=256, microbatch=1, dtype="bfloat16")
    named = dict(model=dict(preset="mixtral-8x7b"), layout=layout, train=train, cluster=dict(chip="h100", nodes=8))
    run = run_from_dict(named)
    job = job_of(run)
    for owner in ("parameters", "optimizer", "gathered"):
        counted, estimated = memory_of(run, job).ranks[0][owner], memory(job).ranks[0][owner]
        assert estimated == pytest.approx(counted, rel=0.03)


@pytest.mark.drawn(group="searches")
def test_every_number_of_devices_has_a_layout_or_a_reason() -> None:
    found = search(auto("llama3-70b", 1, global_batch=128), devices=[8, 64, 128], keep=1)
    assert {row.run.layout.world for row in found.ranking} == {64, 128}
    worth = [row.account.step_seconds * row.run.layout.world for row in found.ranking]
    assert worth == sorted(worth)
    assert list(found.without) == [8]
    assert found.without[8].startswith("nothing fits on 8 devices: the leanest layout")
    assert found.as_dict()["without"] == [{"devices": 8, "reason": found.without[8]}]
    alone = search(auto("llama3-70b", 1, global_batch=128), devices=[64], keep=1)
    assert alone.best.run in [row.run for row in found.ranking]
    illegal = search(auto("llama3-8b", 1, global_batch=8), devices=[8, 296], keep=3)
    assert illegal.without == {296: "no layout is legal on 296 devices"}


@pytest.mark.drawn(group="searches")
def test_what_is_spent_on_activations_pushes_no_number_of_devices_out() -> None:
    run = auto("mixtral-8x22b", 16)
    found = search(run, devices=[128, 256], keep=2)
    assert {row.run.layout.world for row in found.ranking} == {128, 256}
    assert len(found.ranking) == len(found.next_changes) == 2


@LARGE
def test_leaner_layouts_are_looked_at_where_none_of_the_fastest_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the estimate were off by two, most of the fastest would fall away, and the search would still find what really fits."""
    run = auto("mixtral-8x7b", 4, seq_len=8192, global_batch=128)
    real = Space.__init__

    def roomy(self: Space, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        self.capacity *= 2.0

    monkeypatch.setattr(Space, "__init__", roomy)
    found = search(run, keep=20)
    assert len(found.ranking) == 20
    assert all(plan(row.run).fits for row in found.ranking)


def test_a_limit_of_a_microbatch_that_is_given_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.microbatch is given \(1\): set that to 0") as told:
        search(auto("llama3-8b", 1), max_microbatch=4)
    assert [problem.key for problem in told.value.problems] == ["max_microbatch"]
    most = {
        row.run.train.microbatch
        for row in search(auto("llama3-8b", 1, microbatch=0), max_microbatch=2, keep=30).ranking
    }
    assert most == {1, 2}


def test_more_layers_than_a_plan_is_made_for_are_refused() -> None:
    with pytest.raises(UserError, match="100000 must be at most 4096"):
        run_from_dict(dict(model=dict(layers=100_000)))
