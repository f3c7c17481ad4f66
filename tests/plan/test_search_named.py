"""Searches of runs that name how activations or parameters leave the device or are recomputed, a schedule or an objective: the
tables say of each layout what its plan says, so none is left out or put in the wrong place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.operations import layer
from shardwise.plan.cost.rematerialization import within_budget
from shardwise.plan.search import search
from shardwise.plan.search.pool import LEAST_MEMORY, all_candidates
from shardwise.plan.search.search import spaces_of
from shardwise.plan.search.simulate import simulate
from shardwise.plan.time.step import prepare, step_time
from shardwise.plan.trainer.memory import memory_of
from shardwise.plan.trainer.rank import planned_rank
from shardwise.plan.trainer.state import saved_by_stages
from shardwise.run import Run, UserError, run_from_dict

NAMED: dict[str, dict[str, Any]] = {
    "offload": dict(layout=dict(offload=True)),
    "budget": dict(layout=dict(recompute="budget", recompute_budget=2.0)),
    "budget of unlike ranks": dict(layers=5, layout=dict(recompute="budget", recompute_budget=2.0)),
    "operations": dict(layout=dict(recompute="operations", recompute_operations=["ffn"])),
    "host": dict(memory=dict(activations="host")),
    "bits": dict(memory=dict(activation_bits=4)),
    "lossless": dict(activation="relu2", memory=dict(lossless=True)),
    "dpo": dict(objective=dict(kind="dpo")),
    "dpo lora": dict(objective=dict(kind="dpo"), adapter=dict(kind="lora", rank=16)),
    "bpipe": dict(layers=16, layout=dict(schedule="bpipe", pipeline=4), cluster=dict(intra_gbs=20.0)),
    "dualpipe": dict(layout=dict(schedule="dualpipe", pipeline=4)),
}
SHOWN = 12


def made(name: str) -> Run:
    keys = NAMED[name]
    model: dict[str, Any] = dict(
        layers=keys.get("layers", 8), hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000
    )
    model["activation"] = keys.get("activation", "swiglu")
    train = dict(seq_len=4096, global_batch=16, dtype="bfloat16")
    layout = dict(auto=True) | keys.get("layout", {})
    cluster = dict(chip="h100", nodes=1, devices_per_node=4) | keys.get("cluster", {})
    others = {table: keys[table] for table in ("memory", "objective", "adapter") if table in keys}
    return run_from_dict(dict(model=model, layout=layout, train=train, cluster=cluster) | others)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.drawn(3)
def test_layouts_of_a_named_key_are_searched_as_they_are_planned(name: str) -> None:
    seen = 0
    for space in spaces_of(made(name), 4, 4):
        every = all_candidates(space, np.inf).found
        some = every[:: max(1, len(every) // SHOWN)]
        simulated = simulate([(one.group, one.layout) for one in some])
        seen += len(some)
        for candidate, seconds in zip(some, simulated, strict=True):
            run = candidate.group.run_at(candidate.layout)
            job = job_of(run)
            assert seconds == pytest.approx(step_time(prepare(job)).seconds, rel=1e-6), run.layout
            if name != "offload":  # which is estimated, by another formula
                assert memory_of(run, job).peak >= LEAST_MEMORY * candidate.memory, run.layout
    assert seen


def test_optimal_recomputation_is_refused_with_its_reason() -> None:
    with pytest.raises(UserError, match='then set "optimal" in the layout it finds'):
        run_from_dict(
            dict(layout=dict(auto=True, recompute="optimal", recompute_budget=1.0), cluster=dict(chip="h100", nodes=1))
        )


def test_a_search_of_lossless_saved_tensors_finds_a_layout() -> None:
    """One rule took its arrays for numbers, and the search ended in a traceback."""
    found = search(made("lossless"), keep=1).best.run
    assert found.memory.lossless
    assert found.layout.recompute == "none"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", NAMED)
def test_no_layout_of_the_space_that_fits_beats_the_one_found(name: str) -> None:
    best = search(made(name), keep=1).best
    assert best.fits
    for space in spaces_of(made(name), 4, 4):
        every = all_candidates(space, np.inf).found
        some = [one for one in every if one.seconds < 1.1 * best.account.step_seconds][:SHOWN]
        for one, seconds in zip(some, simulate([(one.group, one.layout) for one in some]), strict=True):
            run = one.group.run_at(one.layout)
            assert seconds >= best.account.step_seconds * (1 - 1e-6) or not memory_of(run, job_of(run)).fits, run.layout


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(
    "layout",
    [
        dict(),
        dict(shard=4),
        dict(tensor=4),
        dict(tensor=2, shard=2),
        dict(context=2, shard=2),
        dict(tensor=4, pipeline=2),
    ],
    ids=str,
)
def test_as_many_bytes_leave_in_the_planned_time_as_in_the_trainer(layout: dict[str, int], experts: int) -> None:
    model = dict(layers=4, hidden=256, heads=8, kv_heads=2, ffn=512, vocab=512)
    if experts:
        model |= dict(experts=experts, experts_per_token=2, expert_ffn=128)
    train = dict(seq_len=256, global_batch=8, microbatch=1, dtype="bfloat16")
    cluster = dict(chip="h100", nodes=1)
    run = run_from_dict(dict(model=model, layout=layout, train=train, cluster=cluster, memory=dict(activations="host")))
    place, job = planned_rank(run, 0), job_of(run)
    ((one,), layers) = within_budget(job, layer(job, routed=bool(experts)), 0.0), len(place.recomputed)
    assert one.spared * layers == sum(stage.away for stage in saved_by_stages(place))
