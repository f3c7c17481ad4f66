"""A GRPO run beside its plan, rounds of answers included, and under the profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import grpo_run
from parallel_pool import RankPool

from shardwise.measure.profile import Recording, prepare_folder, record
from shardwise.measure.verify import TOLERANCE, Verdict, verify_rank
from shardwise.run import Run


def verified(rank: int, run: Run) -> Verdict:
    return verify_rank(run, steps=1)


def assert_as_planned(verdict: Verdict) -> None:
    assert not verdict.beyond(TOLERANCE | dict(memory=0.0))
    found = {each.name: each.second for each in verdict.rollouts}
    assert found["steps"] > 0
    assert found["tokens"] > 0
    assert found["bytes cache"] > 0


@pytest.mark.parametrize(
    ("adapter", "serve"),
    [
        (dict(kind="lora", rank=2), {}),
        pytest.param(dict(kind="none"), dict(max_sequences=3), marks=pytest.mark.large("answers that wait for others")),
    ],
    ids=["lora", "few at once"],
)
def test_a_round_does_what_its_plan_says(task: Path, adapter: dict[str, Any], serve: dict[str, Any]) -> None:
    verdict = verified(0, grpo_run(task, train=dict(seq_len=32), adapter=adapter, serve=serve))
    assert_as_planned(verdict)
    own = next(each.second for each in verdict.rollouts if each.name == "bytes weights")
    assert (own > 0) == (adapter["kind"] == "lora")


@pytest.mark.parametrize(
    "layout", [dict(shard=2), dict(tensor=2), dict(pipeline=2)], ids=lambda layout: "-".join(layout)
)
@pytest.mark.drawn(group="grpo on ranks")
def test_a_round_on_ranks(ranks: RankPool, task: Path, layout: dict[str, Any]) -> None:
    """Engines cut as the trainer is: what each rank holds, what it sends for the weights of others, steps and tokens."""
    sent = 0.0
    for verdict in ranks.run(2, verified, grpo_run(task, layout=layout)):
        assert_as_planned(verdict)
        sent += next(each.second for each in verdict.rollouts if each.name == "bytes sent")
    assert (sent > 0) == ("tensor" not in layout)  # tensor ranks train what their engine holds


@pytest.mark.drawn(group="profiles")
def test_a_profile_has_rounds_of_answers(task: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    prepare_folder(folder)
    record(grpo_run(task), folder, Recording(1, 1))
    (figures,) = json.loads((folder / "profile.json").read_text())["batches"]
    assert figures["rollout_tokens_per_s"] > 0
    trace = gzip.decompress((folder / "ranks" / "rank-00000.json.gz").read_bytes()).decode()
    assert "rollouts" in trace
