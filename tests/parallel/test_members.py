"""Replicas that come and go, each a thread of one process: with all of them there they are those of `test_outer.py`; one that
leaves and another that takes its place are as a loop over replicas has them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import outer_reference
import pytest
import torch

from shardwise.parallel.members import Place
from shardwise.parallel.mesh import Mesh
from shardwise.run import Run
from shardwise.train.elastic import Elastic
from shardwise.train.faults.coordinator import Coordinator
from shardwise.train.step import TrainState

STEPS = 7
LAYOUTS: list[dict[str, Any]] = [
    dict(replicate=2, sync_every=2),
    dict(replicate=3, sync_every=3, outer_optimizer="average", compress="int4"),
    dict(replicate=2, sync_every=4, sync_fragments=2, sync_overlap=1, sync_mix=0.3, compress="int8"),
]


def make(layout: dict[str, Any]) -> Run:
    size = 6 if layout["replicate"] == 3 else 4
    return cases.make_run("dense", layout | dict(sync_elastic=True), steps=STEPS, global_batch=size, layers=2)


def enter(run: Run, coordinator: Coordinator, replica: int, start: int = 0) -> TrainState:
    place = Place(replica, start, 0, "127.0.0.1", coordinator.port, coordinator.store)
    elastic = Elastic(run, place)
    return TrainState(run, Mesh(elastic.run.layout), elastic)


def train(state: TrainState, run: Run, last: int) -> list[float]:
    """The steps still to come, to the last."""
    assert state.elastic is not None
    losses = []
    for number in range(state.step + 1, last + 1):
        rows = state.samples(np.arange(run.train.global_batch))
        result = state.train_step(cases.take(cases.batch(number - 1, True, run.train.global_batch), rows))
        losses.append(result.loss.item())
        state.elastic.after_step(state, None)
    return losses


def begin_and_train(state: TrainState, run: Run, last: int) -> list[float]:
    assert state.elastic is not None
    state.elastic.begin(state)
    return train(state, run, last)


def close_to(state: TrainState, weights: dict[str, np.ndarray]) -> None:
    for name, value in outer_reference.read(state).items():
        worst = np.abs(value - weights[name]).max() / max(np.abs(weights[name]).max(), 0.1)
        assert worst < 1e-9, f"{name} {worst}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.drawn(1)
def test_replicas_that_are_all_there_train_as_a_loop_over_them(layout: dict[str, Any]) -> None:
    run, count = make(layout), layout["replicate"]
    losses, weights = outer_reference.simulated(replace(run, layout=replace(run.layout, sync_elastic=False)))
    with Coordinator(count, 1, lambda what, **values: None) as coordinator, ThreadPoolExecutor(count) as pool:
        states = [enter(run, coordinator, n) for n in range(count)]
        found = [each.result(120) for each in [pool.submit(begin_and_train, s, run, STEPS) for s in states]]
    for n, state in enumerate(states):
        np.testing.assert_allclose(found[n], [each[n] for each in losses], rtol=1e-9)
        close_to(state, weights[n])


def test_one_that_joins_has_the_state_of_the_one_it_joins_by() -> None:
    """Behind step 2 a replica leaves, which has sent nothing of its second round; another start of it joins behind step 4."""
    run, said = make(LAYOUTS[0]), list[tuple[str, dict[str, Any]]]()
    with Coordinator(2, 1, lambda what, **values: said.append((what, values))) as coordinator:
        pool = ThreadPoolExecutor(3)
        states = [enter(run, coordinator, n) for n in range(2)]
        both = [pool.submit(begin_and_train, state, run, 2) for state in states]
        assert all(each.result(120) for each in both)
        coordinator.membership.leave(1, 0)
        joiner = enter(run, coordinator, 1, start=1)
        assert joiner.elastic is not None
        joins = pool.submit(joiner.elastic.begin, joiner)
        while not coordinator.membership.desks[1].asked:
            assert not joins.done()
        train(states[0], run, 4)
        assert joins.result(120)
        assert joiner.step == 4
        assert joiner.tokens == states[0].tokens
        for ours, theirs in zip(joiner.parallel.parameters, states[0].parallel.parameters, strict=True):
            assert torch.equal(ours.parameter, theirs.parameter)
        for n in range(len(joiner.parallel.parameters)):
            for kept in ("optimizer", "outer"):
                theirs = getattr(states[0], kept).state_of(n)
                for key, value in getattr(joiner, kept).state_of(n).items():
                    assert torch.equal(value, theirs[key]), (n, kept, key)
        ends = [pool.submit(train, state, run, STEPS) for state in (states[0], joiner)]
        assert all(len(each.result(120)) == STEPS - 4 for each in ends)
        close_to(joiner, outer_reference.read(states[0]))  # behind the last step all are alike
        pool.shutdown()
    added = [values["added"] for what, values in said if what == "exchange"]
    assert added == [[0, 1], [0], [0, 1], [0, 1]]
