"""The search: its rules are the run's own, its closed forms are near what is simulated, and what it ranks first is the best."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.plan.cost.job import job_of
from shardwise.plan.plan import plan
from shardwise.plan.search import resolve, search
from shardwise.plan.search.bubbles import Pace, in_flight, makespan
from shardwise.plan.search.pool import LEAST_MEMORY_OF_MANY
from shardwise.plan.search.screen import Space
from shardwise.plan.search.screened import LayoutIndex
from shardwise.plan.search.search import spaces_of
from shardwise.plan.search.simulate import simulate
from shardwise.plan.search.space import Sizes, legal, with_choices
from shardwise.plan.time.step import prepare, step_time
from shardwise.plan.trainer.memory import memory_of
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.run import LayoutConfig, Run, UserError, run_from_dict, to_dict
from shardwise.run.axes import V_SHAPED
from shardwise.run.rules.check import batch_rules, broken_rules
from shardwise.schedules import SCHEDULES, Cost, make_schedule, peak_activations, time


def auto(preset: str = "", layout: Any = "auto", chip: str = "h100", nodes: int = 1, **keys: Any) -> Run:
    """A run whose layout is to be found."""
    train = dict(global_batch=64, seq_len=4096, dtype="bfloat16") | keys
    cluster = dict(chip=chip, nodes=nodes)
    return run_from_dict(dict(model=dict(preset=preset), layout=layout, train=train, cluster=cluster))


SMALL = dict(layers=6, hidden=192, heads=6, kv_heads=3, vocab=512, ffn=384)
MIXED = SMALL | dict(experts=4, experts_per_token=2, expert_ffn=96, dense_layers=1, shared_experts=1)
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(max_examples=300, deadline=None)
@given(
    model=st.sampled_from([SMALL, MIXED, MIXED | dict(dense_layers=0, shared_experts=0)]),
    axes=st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES),
    microbatch=st.sampled_from([1, 2, 3]),
    batch=st.sampled_from([8, 24, 96, 288]),
    seq_len=st.sampled_from([32, 48, 96, 144]),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    chunks=st.sampled_from([1, 2, 3]),
    method=st.sampled_from(["ring", "ulysses", "gather"]),
    wide=st.booleans(),
    offload=st.booleans(),
    recompute=st.sampled_from(["none", "full", "operations"]),
    devices=st.sampled_from([0, 0, 0, 4, 6]),
)
def test_legal_is_what_a_run_may_be(
    model: dict[str, Any], axes: tuple[int, ...], microbatch: int, batch: int, seq_len: int, schedule: str, chunks: int,
    method: str, wide: bool, offload: bool, recompute: str, devices: int,
) -> None:  # fmt: skip
    names = ("replicate", "shard", "context", "tensor", "pipeline", "expert")
    sizes = dict(zip(names, axes, strict=True))
    words = dict(schedule=schedule, chunks=chunks, context_method=method, expert_tensor=wide, offload=offload,
                 recompute=recompute)  # fmt: skip
    world = devices or LayoutConfig(**sizes).world
    train = dict(microbatch=microbatch, global_batch=batch, seq_len=seq_len, device="cpu")
    cluster = dict(nodes=1, devices_per_node=world)
    try:
        run_from_dict(dict(model=model, layout=sizes | words, train=train, cluster=cluster))
        allowed = True
    except UserError:
        allowed = False
    run = run_from_dict(dict(model=model, layout="auto", train=train, cluster=cluster | dict(chip="h100")))
    arrays = {name: np.array([size]) for name, size in sizes.items()}
    layout = replace(run.layout, **arrays, **words)
    train_arrays = replace(run.train, microbatch=np.array([microbatch]))
    many = replace(
        run, layout=layout, train=train_arrays, cluster=replace(run.cluster, nodes=1, devices_per_node=world)
    )
    assert bool(legal(many, batch_rules(many))[0]) == allowed


@pytest.mark.parametrize(("model", "devices"), [(SMALL, 6), (MIXED, 4)], ids=["dense", "experts"])
def test_the_space_holds_every_layout_that_breaks_no_rule_and_no_other(model: dict[str, Any], devices: int) -> None:
    train = dict(global_batch=8, seq_len=48, device="cpu")
    run = run_from_dict(
        dict(model=model, layout="auto", train=train, cluster=dict(chip="h100", devices_per_node=devices))
    )
    space = Space(run, devices, devices)
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    layouts = [axes for axes in product(divisors, repeat=5) if np.prod(axes) == devices]
    keys = dict(
        context_method=("ring", "ulysses"), async_tensor=(False, True), expert_tensor=(False, True), zero=(1, 3),
        schedule=("1f1b", "interleaved", "zb-v"), chunks=(2, 3), recompute=("none", "full"),
    )  # fmt: skip
    rng, held = random.Random(devices), 0
    for axes, expert, microbatch in product(layouts, (1, 2, 3, 4), (1, 2, 4, 8)):
        size = Sizes(*axes, expert, microbatch)
        for _ in range(6):
            chosen = {name: rng.choice(values) for name, values in keys.items()}
            broken = list(broken_rules(with_choices(space.run, size, chosen, devices, devices)))
            chosen["expert_tensor"] &= bool(model.get("experts"))
            listed = space.find(size, chosen) is not None
            assert listed == (not broken), (size, chosen, broken)
            held += listed
    assert held > 100


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_closed_forms_are_near_the_played_schedule(name: str) -> None:
    rng = random.Random(name)
    for _ in range(25):
        ranks, microbatches = rng.choice((2, 4, 8)), rng.choice((2, 4, 8, 12, 16, 24))
        chunks = {"interleaved": rng.choice((2, 3)), "breadth-first": 2}.get(name, 1 + (name in V_SHAPED))
        f, i, w, hop = 1.0, rng.choice((0.9, 1.1, 2.1)), rng.choice((0.8, 1.0)), rng.choice((0.0, 0.05))
        stages = ranks * chunks
        schedule = make_schedule(name, ranks, microbatches, chunks)
        simulated = time(schedule, Cost.even(stages, f, i, w), hop).makespan
        pace = Pace(ranks, chunks, f, i, w, chunks * (f + i + w), hop)
        assert makespan(name, pace, np.array(microbatches)) == pytest.approx(simulated, rel=0.12)
        for rank, held in enumerate(peak_activations(schedule)):
            counted = chunks * in_flight(name, ranks, chunks, rank, np.array(microbatches))
            assert counted == pytest.approx(held, rel=0.01)


def places(space: Space, count: int, seed: int) -> list[tuple[Any, LayoutIndex, float, float]]:
    """Some layouts that nearly fit, with what screening says of them."""
    rng = random.Random(seed)
    found = []
    for _ in range(50 * count):
        group = rng.choice(space.groups)
        row, schedule = rng.choice(group.rows()), rng.choice(group.schedules)
        (one,) = group.screen([schedule], np.array([row]))
        methods = np.flatnonzero(np.isfinite(one.seconds[:, 0]))
        cheap = group.pipeline * (schedule[1] if schedule[0] in ("interleaved", "breadth-first") else 1) <= 32
        if len(methods) and cheap and one.memory[0] < 1.5 * space.capacity:
            method = int(rng.choice(methods))
            found.append((group, LayoutIndex(*schedule, method, int(row)), one.seconds[method, 0], one.memory[0]))
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize(
    ("run", "devices"),
    [
        (auto("llama3-8b", nodes=8), 64),
        (auto("gpt3-175b", chip="a100-80g", nodes=64, global_batch=1536, seq_len=2048), 512),
        (auto("mixtral-8x7b", nodes=16, global_batch=256), 128),
        (auto("mixtral-8x7b", nodes=16, global_batch=256, optimizer="muon"), 128),
    ],
    ids=["llama3-8b", "gpt3-175b", "mixtral-8x7b", "mixtral-8x7b-muon"],
)
@pytest.mark.drawn(1)
def test_screening_is_near_the_plan(run: Run, devices: int) -> None:
    space = Space(run, devices, 8)
    sample = places(space, 25, devices)
    assert len(sample) == 25
    errors, rooms = [], []
    for group, place, seconds, need in sample:
        resolved = group.run_at(place)
        assert run_from_dict(to_dict(resolved)) == resolved
        job = job_of(resolved)
        exact = step_time(prepare(job)).seconds
        assert simulate([(group, place)]) == [pytest.approx(exact, rel=1e-9)]
        errors.append(abs(seconds / exact - 1))
        rooms.append(memory_of(resolved, job).peak / need)
    assert np.quantile(errors, 0.9) < 0.10
    assert max(errors) < 0.25
    assert abs(np.median(rooms) - 1) < 0.05
    assert min(rooms) > LEAST_MEMORY_OF_MANY  # what is leaner than screened could be missed


@pytest.mark.drawn(group="searches")
def test_the_best_of_all_is_found() -> None:
    run = auto("qwen2.5-0.5b", layout=dict(auto=True, replicate=1), global_batch=16, seq_len=2048, microbatch=1)
    run = replace(run, cluster=replace(run.cluster, devices_per_node=4))
    result = search(run, keep=10)
    places = []
    for group in (group for space in spaces_of(run, 4, 4) for group in space.groups):
        for (schedule, chunks), method, row in product(group.schedules, range(len(group.methods)), group.rows()):
            if group.legal[method, row % group.shape[2]]:
                places.append((group, LayoutIndex(schedule, chunks, method, int(row))))
    times = {group.run_at(place): seconds for (group, place), seconds in zip(places, simulate(places), strict=True)}
    assert result.searched == len(times) > 700
    best = min((one for one in times if memory_of(one, job_of(one)).fits), key=lambda one: times[one])
    assert best in [ranked.run for ranked in result.ranking]
    assert result.best.account.step_seconds <= times[best] * (1 + 1e-9)
    for ranked in result.ranking:
        assert ranked.fits
        assert ranked.account.step_seconds == plan(ranked.run).account.step_seconds
    seconds = [ranked.account.step_seconds for ranked in result.ranking]
    assert seconds == sorted(seconds)


def test_fixed_keys_stay_and_a_resolved_run_is_a_run() -> None:
    run = auto("llama3-8b", layout=dict(auto=True, tensor=2, recompute="full", schedule="1f1b"), nodes=2, microbatch=2)
    result = search(run, keep=5)
    for ranked in result.ranking:
        lay = ranked.run.layout
        assert (lay.tensor, lay.recompute, lay.schedule, ranked.run.train.microbatch) == (2, "full", "1f1b", 2)
        assert run_from_dict(to_dict(ranked.run)) == ranked.run
        assert lay.world == 16
    best = resolve(run)
    assert not best.layout.auto
    assert best == result.best.run
    assert resolve(best) is best
    assert len(result.next_changes) == len(result.ranking)
    assert all("→" in change and "GiB" in change for change in result.next_changes)


@pytest.mark.drawn(group="searches")
def test_several_numbers_of_devices_share_a_front() -> None:
    result = search(auto("llama3-8b", nodes=2), devices=[8, 16], keep=6)
    worth = [p.account.step_seconds * p.run.layout.world for p in result.ranking]
    assert worth == sorted(worth)
    assert {p.run.layout.world for p in result.pareto} == {8, 16}
    points = [(p.account.step_seconds, p.account.memory.peak, p.run.layout.world) for p in result.pareto]
    for one in points:
        assert not any(all(a < 0.9 * b for a, b in zip(other, one, strict=True)) for other in points)
    named = result.as_dict()
    assert named["searched"] == result.searched > result.simulated > 0
    assert {"layout", "step_seconds", "binds", "next_change"} <= named["ranking"][0].keys()


@pytest.mark.drawn(group="searches")
def test_a_search_repeats_itself() -> None:
    run = auto("llama3-8b", nodes=2)
    first, second = search(run, keep=4), search(run, keep=4)
    assert [p.run for p in first.ranking] == [p.run for p in second.ranking]


def test_what_does_not_fit_is_told_with_what_would() -> None:
    with pytest.raises(UserError) as told:
        search(auto("llama3-70b", nodes=1))
    message = str(told.value)
    assert "nothing fits on 8 devices" in message
    assert "optimizer" in message
    assert "GiB" in message
    count = int(message.split(" devices (")[0].split()[-1])
    assert count > 8
    assert count % 8 == 0
    assert search(auto("llama3-70b", nodes=count // 8), keep=1).best.fits


def test_nonsense_is_refused_with_all_reasons() -> None:
    with pytest.raises(UserError) as told:
        search(auto("llama3-8b", chip="h10"), keep=0)
    assert {p.key for p in told.value.problems} == {"cluster.chip", "keep"}

    assert "h100" in str(told.value)
    with pytest.raises(UserError, match="not whole machines of 8"):
        search(auto("llama3-8b"), devices=[12])
    with pytest.raises(UserError, match=r"is given; write layout"):
        search(run_from_dict({}))
    with pytest.raises(UserError, match="is not a multiple of") as told:
        search(auto("llama3-8b", nodes=11, global_batch=7, seq_len=4095))
    assert "no layout of run is legal on 88 devices" in str(told.value)


@pytest.mark.parametrize(
    "given", [dict(devices=[8.0]), dict(devices=8), dict(devices="8"), dict(keep=2.5), dict(max_microbatch="1")]
)
def test_what_is_no_whole_number_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not a") as told:
        search(auto("llama3-8b"), **given)
    assert [problem.key for problem in told.value.problems] == list(given)


def test_all_layouts_are_kept_of_a_count_beyond_every_one() -> None:
    run = auto("llama3-8b", layout=dict(auto=True, shard=8, recompute="full", zero=3))
    found = search(run, keep=10**23)
    assert len(found.ranking) == len(search(run, keep=1000).ranking)
    with pytest.raises(UserError, match="with tensor, pipeline fixed"):
        search(auto("llama3-8b", layout=dict(auto=True, tensor=3, pipeline=5), nodes=1))


@pytest.mark.drawn(group="searches")
def test_what_a_layout_decides_is_settled_before_layouts_are_compared() -> None:
    """GPUs compile by themselves; a compiled layer is repeated whole or not at all, and does not defer its weight gradients."""

    def found(devices: int, **layout: Any) -> set[tuple[object, str]]:
        run = run_from_dict(
            dict(
                model=dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256),
                layout=dict(auto=True, **layout),
                train=dict(seq_len=2048, global_batch=8, dtype="bfloat16"),
                cluster=dict(chip="h200", devices_per_node=devices),
            )
        )
        return {(p.run.train.compile, p.run.layout.recompute) for p in search(run).ranking}

    assert {compiled for compiled, _ in found(1)} == {True}
    assert not {recompute for _, recompute in found(1)} & {"attention", "operations"}
    assert True in {compiled for compiled, _ in found(8)}
    assert {compiled for compiled, _ in found(8, pipeline=8, schedule="zb-h1", fixed=("pipeline", "schedule"))} == {
        False
    }
    assert found(1, recompute="attention") == {(False, "attention")}


def test_memory_that_is_free_is_spent_on_activations_that_are_kept() -> None:
    """All layers would be recomputed, though there is room for most: as many are kept as fit, and one more would not."""
    run = run_from_dict(
        dict(
            model=dict(preset="llama3-8b"),
            layout="auto",
            train=dict(seq_len=8192, global_batch=1, dtype="bfloat16", compile=True),
            cluster=dict(chip="h200", devices_per_node=1),
        )
    )
    found = search(run)
    best, full = found.ranking[:2]
    assert (best.run.layout.recompute, full.run.layout.recompute) == ("budget", "full")
    assert best.fits
    assert best.account.step_seconds < 0.9 * full.account.step_seconds
    assert "none" in found.next_changes[0]
    assert best.binds.startswith("arithmetic: ")  # nine tenths of it compute, though the optimizer takes its share
    assert "optimizer" in best.binds
    again = [parts for parts in PlannedRank(best.run, 0).recomputed.values() if parts]
    assert 0 < len(again) < 16
    more = replace(best.run.layout, recompute_budget=best.run.layout.recompute_budget + 2.0)
    assert len([parts for parts in PlannedRank(replace(best.run, layout=more), 0).recomputed.values() if parts]) < len(
        again
    )
    assert not plan(replace(best.run, layout=more)).fits
    fixed = replace(run, layout=replace(run.layout, recompute="full", fixed=("recompute",)))
    assert [p.run.layout.recompute for p in search(fixed).ranking] == ["full"]
