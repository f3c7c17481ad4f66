"""Samples of text at evaluations: the network's own, the same on every layout, where it can be asked for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_pool import RankPool
from tiny_run import tiny_run

from shardwise.launch.job import estimate
from shardwise.measure.counts.traffic import Traffic, TrafficCounter
from shardwise.measure.verify import random_batch
from shardwise.run import Run, UserError, run_from_dict
from shardwise.train.loop import train
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.progress.samples import continued
from shardwise.train.step import TrainState
from shardwise.workbench.follow import FollowedRun


def sampled(**keys: Any) -> Run:
    return tiny_run(**dict(steps=2, eval_every=1, eval_sequences=2, samples=3, sample_tokens=5, dtype="float64") | keys)


def samples_of(folder: Path) -> list[list[dict[str, str]]]:
    return [record["samples"] for record in read_metrics(folder) if "samples" in record]


def train_rank(rank: int, run: Run, out: Path) -> None:
    train(run, out)


@pytest.mark.drawn(group="whole runs")
def test_samples_are_written_followed_and_the_same_when_sharded(tmp_path: Path, ranks: RankPool) -> None:
    run = sampled()
    train(run, tmp_path / "one")
    found = samples_of(tmp_path / "one")
    assert [len(each) for each in found] == [3, 3]
    assert [each["prompt"] for each in found[0]] == [each["prompt"] for each in found[1]]
    assert all(len(each["prompt"].encode()) == 8 for each in found[0])  # a quarter of 32 bytes
    watched = FollowedRun(tmp_path / "one", "one")
    watched.look()
    assert [each["texts"] for each in watched.samples] == found
    spread = sampled(layout=dict(shard=2, zero=3))
    ranks.run(2, train_rank, spread, tmp_path / "two")
    assert samples_of(tmp_path / "two") == found


def test_a_sample_is_what_the_network_says() -> None:
    run = sampled()
    state = TrainState(run)
    (model,) = state.parallel.models
    with torch.no_grad():  # a network that says 7 after anything
        for parameter in model.parameters():
            parameter.zero_()
        model.norm.weight.fill_(1.0)
        model.embed.weight[:, 0] = 1.0
        model.head.weight[7, 0] = 1e4
    made = continued(state, torch.tensor([[1, 2], [3, 4]]), 4, 0)
    assert made.tolist() == [[1, 2, 7, 7, 7, 7], [3, 4, 7, 7, 7, 7]]


def messages_behind_samples(rank: int, run: Run) -> list[Traffic]:
    """The messages of a step, and of a step behind samples."""
    state, found = TrainState(run), []
    batch = random_batch(run, rank)
    for samples in (False, True):
        if samples:
            continued(state, torch.tensor([[1, 2], [3, 4]]), 2, 0)
            state.parallel.models[0].train()
        with TrafficCounter(state.mesh.axes_by_group()) as counter:
            state.train_step(batch)
        found.append(counter.messages)
    return found


def test_samples_leave_nothing_for_a_backward_pass(ranks: RankPool) -> None:
    """Layers are gathered from all ranks again, and not from secondary shards. The head stays gathered, as behind any pass."""
    run = sampled(layout=dict(shard=4, zero=3, secondary_shard=2))
    for plain, behind in ranks.run(4, messages_behind_samples, run):
        assert plain - behind == {("zero", "all_gather"): 1}
        assert not behind - plain


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(layout=dict(tensor=2)), "without tensor, pipeline and context parallelism"),
        (dict(objective=dict(kind="dpo")), "objective.kind = dpo"),
        (dict(train=dict(samples=2, eval_every=0)), "train.eval_every is 0"),
        (dict(train=dict(samples=2, seq_len=64, sample_tokens=60)), "more than train.seq_len = 64"),
    ],
)
def test_where_no_samples_can_be_made(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run_from_dict(dict(train=dict(samples=2, global_batch=4)) | keys)


def test_samples_are_in_the_time_of_a_job() -> None:
    plain = run_from_dict(dict(cluster=dict(chip="h100"), train=dict(steps=1000, eval_every=10)))
    asked = replace(plain, train=replace(plain.train, samples=4, sample_tokens=64))
    without, beside = estimate(plain), estimate(asked)
    assert without is not None
    assert beside is not None
    assert beside.expected > 1.05 * without.expected
