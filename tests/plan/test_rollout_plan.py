"""The plan of a run that makes its own answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.cli.planning.plan import rollout_figures
from shardwise.plan.plan import plan
from shardwise.plan.search import search
from shardwise.plan.serving.rollouts import own_weight_bytes, plan_rollouts, round_seconds, simulated_round
from shardwise.run import Run, UserError, run_from_dict


def planned(objective: dict[str, Any] | None = None, **more: Any) -> Run:
    sections: dict[str, dict[str, Any]] = dict(
        model=dict(preset="llama3-1b"),
        train=dict(global_batch=64, microbatch=8, seq_len=1024, dtype="bfloat16", device="cuda", weights="somewhere"),
        objective=dict(kind="grpo", rewards=["r.py:f"], group=8, completion_tokens=512) | (objective or {}),
        serve=dict(max_sequences=64),
        cluster=dict(chip="h200"),
    )
    for section, values in more.items():
        sections[section] = sections.get(section, {}) | values
    return run_from_dict(sections)


def test_a_step_is_training_a_share_of_a_round_and_what_looks_back() -> None:
    found = plan_rollouts(planned(), 3.0)
    assert found.fits
    assert (found.answers, found.tokens, found.prompt_tokens) == (64, 64 * 512, 512)
    assert found.step_seconds == pytest.approx(3.0 + found.rollout_seconds)
    several = plan_rollouts(planned(dict(kl_beta=0.1, iterations=2, minibatches=2)), 3.0)
    assert (several.answers, several.passes, several.logprob_seconds) == (128, 2, pytest.approx(4.0))
    assert several.step_seconds == pytest.approx(3.0 + (several.rollout_seconds + 4.0) / 4)
    ahead = plan_rollouts(planned(dict(asynchronous=True)), 1e6)
    assert ahead.step_seconds == 1e6  # what is drawn meanwhile takes no time


@pytest.mark.parametrize("memory", [0.0, 0.3])
@pytest.mark.parametrize("minibatches", [9, 20])
@pytest.mark.drawn(group="plans that serve")
def test_rounds_of_many_answers_repeat_themselves(minibatches: int, memory: float) -> None:
    """A part of a long round tells how long all of it takes; a round of a million answers is planned as fast as one of hundreds."""
    run = planned(dict(minibatches=minibatches, completion_tokens=64), serve=dict(max_sequences=32, memory_gib=memory))
    room = plan_rollouts(run, 1.0).memory
    assert round_seconds(run, room) == pytest.approx(simulated_round(run, room).figures.seconds, rel=0.04)
    assert simulated_round(run, room, 16).figures.requests == 16


def test_answers_of_a_group_share_their_prompt() -> None:
    """Fewer prompts to compute for as many answers."""
    alike, apart = (plan_rollouts(planned(dict(group=group)), 1.0).rollout_seconds for group in (32, 2))
    assert alike < apart


def test_only_weights_that_the_trainer_lacks_are_the_engines_own() -> None:
    layers = dict(hidden=64, layers=2, heads=4, vocab=300, ffn=128, preset="")
    once, several = (planned(train=dict(microbatch=size), model=layers) for size in (64, 8))
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    outer = 2 * 300 * 64 + 5 * 64
    assert own_weight_bytes(once, gpu=True) == 2 * outer
    assert own_weight_bytes(several, gpu=True) == 2 * (outer + matrices)
    full = planned(train=dict(dtype="float32", device="cpu"), model=layers, cluster=dict(chip="cpu"))
    assert own_weight_bytes(full, gpu=False) == 0
    shards = planned(
        train=dict(dtype="float32", device="cpu"), model=layers, layout=dict(shard=2), cluster=dict(chip="cpu")
    )
    assert own_weight_bytes(shards, gpu=False) == 4 * (outer + matrices)


def test_plan_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [
        "--model.preset=llama3-1b",
        "--cluster.chip=h200",
        "--train.global_batch=64",
        "--train.microbatch=8",
        "--train.seq_len=1024",
    ]
    keys += [
        "--train.dtype=bfloat16",
        "--objective.kind=grpo",
        "--objective.rewards=r.py:f",
        "--objective.completion_tokens=512",
    ]
    assert main(["plan", *keys]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("answers", "rollouts", "whole step", "keys and values"))
    assert main(["plan", *keys, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rollouts"]["step_seconds"] > found["step_seconds"]
    assert plan(planned()).fits


def test_plan_shows_how_engines_are_cut() -> None:
    run = planned(layout=dict(tensor=2, shard=2), cluster=dict(chip="h200", nodes=1, devices_per_node=4))
    rows = {name: why for name, _, why in rollout_figures(run, plan_rollouts(run, 1.0))}
    assert "a rank of 2 engines of tensor 2" in rows["engine"]
    assert "sending weights to the engines" in rows["rollouts"]
    whole = planned()
    rows = {name: why for name, _, why in rollout_figures(whole, plan_rollouts(whole, 1.0))}
    assert "a rank of" not in rows["engine"]
    assert "anew" not in rows["rollouts"]


SECTIONS: dict[str, Any] = dict(
    model=dict(preset="llama3-8b"), layout=dict(auto=True), cluster=dict(chip="h100", nodes=1, devices_per_node=8),
    train=dict(global_batch=256, seq_len=1024, dtype="bfloat16"),
)  # fmt: skip
ANSWERS = dict(kind="grpo", rewards=["r.py:f"], group=8, completion_tokens=512)


@pytest.mark.drawn(group="searches")
def test_a_search_counts_the_answers() -> None:
    """What trains fastest leaves no room for the engine here: those that are found do, in the order of all that a step takes."""
    trained = search(run_from_dict(SECTIONS), keep=1).best
    asked = run_from_dict(SECTIONS | dict(objective=ANSWERS))
    fastest = replace(asked, layout=trained.run.layout, train=trained.run.train)
    assert not plan_rollouts(fastest, trained.account.step_seconds).fits
    found = search(asked, keep=4)
    plans = [plan_rollouts(each.run, each.account.step_seconds) for each in found.ranking]
    assert len(plans) == 4
    assert all(each.fits for each in plans)
    seconds = [each.step_seconds for each in plans]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-6)


@pytest.mark.large("a search that looks at all layouts before it says that none is there")
def test_a_search_says_that_there_is_no_room_for_an_engine() -> None:
    crowded = SECTIONS["cluster"] | dict(headroom=0.78)
    with pytest.raises(UserError, match="none leaves room for the weights and one answer"):
        search(run_from_dict(SECTIONS | dict(objective=ANSWERS, cluster=crowded)))
