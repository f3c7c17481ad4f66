"""A rank of a replica that comes and goes, in one process: its share of the data, its state given and taken, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import tiny_run

from shardwise.parallel.outer import Outer
from shardwise.plan.search import resolve
from shardwise.run import LayoutConfig, UserError
from shardwise.run.config import ClusterConfig
from shardwise.train import loop
from shardwise.train.batches.source import TokenSource
from shardwise.train.elastic import run_of_replica
from shardwise.train.processes.environment import RankEnvironment
from shardwise.train.processes.launch import check_world
from shardwise.train.step import TrainState

LAYOUT: dict[str, Any] = dict(replicate=2, sync_every=4, sync_elastic=True)


def test_a_replica_is_a_run_on_its_share() -> None:
    run = tiny_run(dict(**LAYOUT, shard=2, tensor=2, compress="int4", sync_fragments=2), global_batch=8)
    one = run_of_replica(run)
    assert (one.layout.world, one.train.global_batch, one.layout.compress) == (4, 4, "none")
    assert (one.layout.shard, one.layout.tensor, one.layout.sync_every) == (2, 2, 1)
    assert one.train.steps == run.train.steps


def test_an_outer_optimizer_begins_with_the_weights_that_the_run_begins_with(tmp_path: Path) -> None:
    loop.train(tiny_run(steps=2, eval_every=0), tmp_path / "before")
    run = tiny_run(steps=4, eval_every=0, weights=str(tmp_path / "before"))
    state = TrainState(run)
    state.outer = Outer(state.parallel.parameters, tiny_run(LAYOUT).layout, None)
    at_first = {n: anchor.clone() for n, anchor in state.outer.anchors.items()}
    silent: Any = SimpleNamespace(log=lambda text: None, note_bytes=lambda count: None)
    assert not loop._restore(state, tmp_path / "out", TokenSource(run), silent, silent)
    for n, held in enumerate(state.parallel.parameters):
        assert torch.equal(state.outer.anchors[n], held.parameter.detach())
        assert not np.array_equal(state.outer.anchors[n].numpy(), at_first[n].numpy()) or held.parameter.ndim == 1


def test_a_launcher_that_starts_all_ranks_is_refused() -> None:
    run = tiny_run(LAYOUT)
    with pytest.raises(UserError, match="start the run by `shardwise train` alone"):
        check_world(run, RankEnvironment(0, 2, 0, "127.0.0.1", 29500, launcher="torchrun"))
    check_world(run, RankEnvironment(0, 1, 0, "127.0.0.1", 29500, has_agent=True))
    apart = replace(run, cluster=ClusterConfig(nodes=2, devices_per_node=3, rendezvous="127.0.0.1:1"))
    with pytest.raises(UserError, match="every replica on one machine: 2 ranks a replica do not divide the 3"):
        check_world(replace(apart, layout=replace(run.layout, replicate=3, shard=2)), None)
    with pytest.raises(UserError, match="needs 1 rank"):
        check_world(run, RankEnvironment(0, 2, 0, "127.0.0.1", 29500, has_agent=True))


def test_a_search_lays_out_replicas_that_come_and_go() -> None:
    cluster = dict(nodes=1, devices_per_node=4, chip="cpu")
    layout = dict(auto=True, fixed=("replicate", "sync_every", "sync_elastic"), **LAYOUT)
    found = resolve(
        replace(tiny_run(global_batch=8, microbatch=1), layout=LayoutConfig(**layout), cluster=ClusterConfig(**cluster))
    )
    assert (found.layout.replicate, found.layout.sync_every, found.layout.sync_elastic) == (2, 4, True)
    assert found.layout.world == 4
