"""What stands beside a plan: changes that bring what they say, layouts that are what the search planned, pictures that add up."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from base_runs import BASE
from patience import HANG_SECONDS

from shardwise.plan.cost.flops import forward_flops, parameters
from shardwise.run import UserError
from shardwise.run.ranks.coordinates import RankCoordinates
from shardwise.workbench.answer import answer
from shardwise.workbench.aside import ENDED, Aside
from shardwise.workbench.aside import answer as aside_answer
from shardwise.workbench.changes import faster_changes, keys_of, memory_error, neighbours, ranking, with_layout
from shardwise.workbench.question import Base, base_of

SMALL = [
    "model.preset=llama3-8b",
    "cluster.chip=h100",
    "cluster.nodes=1",
    "layout.shard=2",
    "layout.tensor=4",
    "train.microbatch=1",
]


@pytest.fixture(scope="module")
def base() -> Base:
    return base_of(None, SMALL)


def test_a_change_brings_what_it_says(base: Base) -> None:
    before = answer(base, {}).best
    found = faster_changes(base, {})
    assert found
    gains = [each["gain"] for each in found if each["fits"]]
    assert gains == sorted(gains, reverse=True)
    for each in found:
        after = answer(base, each["keys"]).best
        # The stall of reading data is not part of the screened time; on this cluster there is none.
        assert before.account.step_seconds / after.account.step_seconds - 1 == pytest.approx(each["gain"], abs=1e-6)
        assert after.account.memory.peak / 2**30 == pytest.approx(each["memory_gib"])
        assert after.fits == each["fits"]
        assert after.run.layout.world == before.run.layout.world


def test_no_faster_neighbour_is_left_out(base: Base) -> None:
    before = answer(base, {}).best.account.step_seconds
    best = 0.0
    for _, keys in neighbours(base.planned({}).run):
        try:
            after = answer(base, keys).best
        except UserError:
            continue
        if after.fits:
            best = max(best, before / after.account.step_seconds - 1)
    assert faster_changes(base, {})[0]["gain"] == pytest.approx(best, abs=1e-6)


def test_what_does_not_fit_is_told_what_would() -> None:
    base = base_of(None, ["model.preset=llama3-8b", "cluster.chip=h100", "layout.replicate=8"])
    assert not answer(base, {}).best.fits
    found = faster_changes(base, {})
    assert found
    assert all(each["fits"] and answer(base, each["keys"]).best.fits for each in found)


@pytest.mark.parametrize("given", [SMALL, [*SMALL[:3], "layout.auto=true"]])
@pytest.mark.drawn(1)
def test_a_row_of_the_ranking_is_the_layout_that_was_planned(given: list[str]) -> None:
    base = base_of(None, given)
    rows = ranking(base, {}, keep=3)["rows"]
    assert [row["step_seconds"] for row in rows] == sorted(row["step_seconds"] for row in rows)
    for row in rows:
        found = answer(base, row["keys"]).best
        assert found.account.step_seconds == row["step_seconds"]
        assert found.account.memory.peak == row["memory"]
        assert keys_of(base, found.run) == row["keys"]


@pytest.mark.drawn(group="browser")
def test_only_the_newest_question_is_answered(base: Base) -> None:
    async def ask() -> list[object]:
        aside = Aside("changes")
        first = asyncio.create_task(aside.ask(base.given, {}))
        await asyncio.sleep(0)
        second = asyncio.create_task(aside.ask(base.given, {"layout.zero": "1"}))
        wrong = [await first, await second, await aside.ask(base.given, {"layout.tensor": "3"})]
        assert aside._process is not None
        aside._process.kill()
        await aside._process.wait()
        return wrong

    first, second, wrong = asyncio.run(ask())
    assert first is None
    expected = faster_changes(base, {"layout.zero": "1"})
    assert second == {"changes": json.loads(json.dumps(expected)), "memory_error": memory_error()}
    assert 0 < memory_error() < 0.05
    assert "problems" in wrong  # type: ignore[operator]


def test_a_process_that_is_killed_is_no_newer_question(base: Base) -> None:
    """Such as by the system when memory is full: the page waited for an answer for ever."""

    async def ask() -> object:
        aside = Aside("ranking")
        process = await aside._started()
        asked = asyncio.create_task(aside.ask(base.given, {}))
        await asyncio.sleep(0)
        process.kill()
        return await asked

    assert asyncio.run(ask()) == ENDED


def test_an_error_of_the_planner_is_an_answer(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("shardwise.workbench.changes.ranking", fails)
    told = aside_answer({"kind": "ranking", "given": base.given, "changes": {}})
    assert told["problems"] == [{"key": "", "message": "the planner has no answer to this: division by zero"}]


def test_a_question_may_find_that_another_has_ended_the_process(base: Base) -> None:
    async def ask() -> object:
        aside = Aside("changes")
        process = await aside._started()
        process.kill()
        await process.wait()
        aside._busy = True  # whoever asked before has not seen yet that it is gone
        answered = await aside.ask(base.given, {"layout.tensor": "3"})
        assert aside._process is not None
        aside._process.kill()
        await aside._process.wait()
        return answered

    assert "problems" in asyncio.run(ask())  # type: ignore[operator]


def test_a_question_is_given_up_when_the_server_is_gone() -> None:
    """However it ended: the process that works an answer out sees that nobody listens."""
    given = {
        "model.preset": "llama3-405b",
        "cluster.chip": "h100",
        "cluster.nodes": "2048",
        "train.global_batch": "2048",
    }
    question = json.dumps({"kind": "ranking", "given": given, "changes": {}})
    command = [sys.executable, "-m", "shardwise.workbench.aside"]
    ended = subprocess.run(command, input=f"{question}\n", capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_of_a_run_that_is_searched_no_single_change_is_told(base: Base) -> None:
    assert faster_changes(base, {"layout.auto": "true"}) == []


@pytest.mark.parametrize("preset", ["llama3-8b", "deepseek-v3", "gpt2-355m"])
def test_the_blocks_add_up_to_the_model(preset: str) -> None:
    planned = answer(base_of(None, [f"model.preset={preset}", "cluster.chip=h100"]), {})
    run = planned.best.run
    blocks = planned.anatomy["model"]
    assert sum(b["times"] * p["parameters"] for b in blocks for p in b["pieces"]) == parameters(run.model).total
    flops = sum(b["times"] * p["flops"] for b in blocks for p in b["pieces"])
    assert flops == pytest.approx(forward_flops(run.model, run.train.seq_len))


BOTH, EMBEDDING, HEAD, NEITHER = [True, True], [True, False], [False, True], [False, False]


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ("1f1b", [EMBEDDING, NEITHER, NEITHER, HEAD]),
        ("zb-v", [BOTH, NEITHER, NEITHER, NEITHER]),
        ("dualpipe", [BOTH, NEITHER, NEITHER, BOTH]),
    ],
)
def test_the_mesh_says_who_has_the_embedding_and_the_head(schedule: str, ends: list[list[bool]]) -> None:
    keys = {"model.layers": "8", "layout.pipeline": "4", "train.global_batch": "16", "train.microbatch": "1"}
    mesh = answer(base_of(None, ["cluster.chip=h100"]), {**keys, "layout.schedule": schedule}).anatomy["mesh"]
    assert mesh["ends"] == ends


def test_the_mesh_is_that_of_the_trainer() -> None:
    sizes = {f"layout.{axis}": "2" for axis in ("replicate", "shard", "context", "tensor", "pipeline")}
    more = {"layout.expert": "4", "layout.schedule": "interleaved", "cluster.nodes": "4"}
    keys = {"model.preset": "mixtral-8x7b", **sizes, **more}
    planned = answer(base_of(None, BASE), keys)
    mesh, run = planned.anatomy["mesh"], planned.best.run
    assert sorted(layer for rank in mesh["stages"] for _, a, b in rank for layer in range(a, b)) == list(
        range(run.model.layers)
    )
    for rank in range(mesh["world"]):
        place = RankCoordinates(run.layout, rank)
        for group, (size, stride) in mesh["spans"].items():
            first = rank - rank // stride % size * stride
            assert [first + n * stride for n in range(size)] == place.members(group)


@pytest.mark.drawn(group="searches")
def test_a_run_without_a_layout_begins_with_the_best_one() -> None:
    base = base_of(None, [*SMALL[:3], "layout=auto"])
    found = answer(with_layout(base), {}).best
    assert not found.run.layout.auto
    assert found.account.step_seconds < answer(base_of(None, SMALL), {}).best.account.step_seconds
    assert with_layout(base_of(None, SMALL)) == base_of(None, SMALL)
