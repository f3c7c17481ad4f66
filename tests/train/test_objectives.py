"""Objectives against the formulas of their papers, written down once more here, and what they have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest
import torch

from shardwise.data.batches import IGNORE_INDEX, Batch
from shardwise.run import Run, UserError
from shardwise.train.objectives.orpo import odds_ratio_losses
from shardwise.train.objectives.simpo import simpo_losses
from shardwise.train.step import TrainState


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def logprobs(seed: int) -> tuple[torch.Tensor, ...]:
    """Mean log-probabilities of pairs."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(-3 * torch.rand(2, 7, dtype=torch.float64, generator=generator).sqrt() for _ in range(4))


def test_the_odds_ratio_is_that_of_the_paper() -> None:
    chosen, rejected, *_ = logprobs(0)
    odds = [torch.exp(each) / (1 - torch.exp(each)) for each in (chosen, rejected)]
    torch.testing.assert_close(odds_ratio_losses(chosen, rejected), -torch.log(sigmoid(torch.log(odds[0] / odds[1]))))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_is_that_of_the_paper(smoothing: float) -> None:
    chosen, rejected, *_ = logprobs(1)
    margin = 2.5 * chosen - 2.5 * rejected - 1.4
    want = -(1 - smoothing) * torch.log(sigmoid(margin)) - smoothing * torch.log(sigmoid(-margin))
    torch.testing.assert_close(simpo_losses(chosen, rejected, 2.5, 1.4, smoothing), want)


def pair_batch(rows: int = 4, length: int = cases.LENGTH, seed: int = 0) -> Batch:
    """Rows of pairs: prompts masked, some of the row left over."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 61, (rows, length))
    targets = generator.integers(0, 61, (rows, length))
    documents, positions = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int64)
    for row in range(rows):
        pairs = 1 + row % 2
        sizes = generator.integers(4, 8, 2 * pairs)
        ends = np.cumsum([*sizes, length - sizes.sum()])
        for n, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            documents[row, start:stop], positions[row, start:stop] = n, np.arange(stop - start)
            targets[row, start : start + 2 if n < 2 * pairs else stop] = IGNORE_INDEX
    return Batch(tokens, targets, positions, documents)


def step(run: Run, batch: Batch) -> tuple[float, float, dict[str, float]]:
    state = TrainState(run)
    result = state.train_step(batch)
    loss, norm, _ = result.read()
    return loss, norm, dict(zip(state.objective.metrics, result.read_measured(), strict=True))


def alone(batch: Batch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and targets of each document that is learned, in order."""
    assert batch.documents is not None
    found = []
    for row in range(len(batch.tokens)):
        for n in range(batch.documents[row].max() + 1):
            own = batch.documents[row] == n
            if (batch.targets[row, own] != IGNORE_INDEX).any():
                found.append((batch.tokens[row, own], batch.targets[row, own]))
    return found


def document_logprobs(run: Run, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of log-probabilities and counts of each document, run through the network one by one: none is packed."""
    network = TrainState(run).model
    sums, counts = [], []
    for tokens, targets in alone(batch):
        logits = network(torch.from_numpy(tokens)[None]).result[0].log_softmax(-1)
        kept = np.flatnonzero(targets != IGNORE_INDEX)
        sums.append(logits[kept, targets[kept]].sum())
        counts.append(len(kept))
    return torch.stack(sums).detach(), torch.tensor(counts, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["orpo", "simpo"])
def test_a_packed_step_is_the_mean_over_pairs_that_are_run_alone(kind: str) -> None:
    run = cases.make_run("dense", {}, layers=2, objective=kind, global_batch=4, microbatch=2)
    batch = pair_batch()
    loss, _, measured = step(run, batch)
    sums, counts = document_logprobs(run, batch)
    chosen, rejected = (sums / counts).unflatten(0, (-1, 2)).unbind(1)
    beta, gamma = run.objective.beta, run.objective.gamma
    if kind == "orpo":
        want = -chosen - beta * torch.log(sigmoid(torch.logit(chosen.exp()) - torch.logit(rejected.exp())))
        assert measured["nll"] == pytest.approx(-chosen.mean().item(), rel=1e-12)
    else:
        want = -torch.log(sigmoid(beta * (chosen - rejected) - gamma))
    assert loss == pytest.approx(want.mean().item(), rel=1e-11)
    assert measured["reward_margin"] == pytest.approx(beta * (chosen - rejected).mean().item(), rel=1e-9)
    assert measured["reward_accuracy"] == pytest.approx((chosen > rejected).double().mean().item())


def test_answers_that_are_not_wanted_are_not_learned_by_tuning() -> None:
    run = cases.make_run("dense", {}, layers=2, objective="sft", global_batch=4, microbatch=2)
    batch = pair_batch()
    assert batch.documents is not None
    labels = (batch.documents % 2 == 0).astype(np.int8)
    wanted = replace(batch, targets=np.where(labels > 0, batch.targets, IGNORE_INDEX))
    assert step(run, replace(batch, labels=labels)) == step(run, wanted)


def test_auxiliary_losses_weigh_the_same_however_much_is_masked() -> None:
    """The gradient is that of the mean loss plus that of the auxiliary losses, the mean over all tokens."""

    def gradients(targets: np.ndarray, **train: Any) -> dict[str, torch.Tensor]:
        run = cases.make_run("softmax", {}, layers=2, global_batch=4, microbatch=2, clip=0.0, **train)
        state = TrainState(run)
        kept = {}

        def keep(step: int, factor: torch.Tensor) -> None:
            for each in state.parallel.parameters:
                assert each.grad is not None
                kept[each.name] = each.grad * factor

        state.optimizer.step = keep  # type: ignore[method-assign]
        state.train_step(replace(batch, targets=targets))
        return kept

    batch = cases.batch(0, True, 4)
    few = batch.targets.copy()
    few[:, 3:] = IGNORE_INDEX
    weights, none = dict(balance_loss=0.5, router_z_loss=0.3), dict(balance_loss=0.0, router_z_loss=0.0)
    with_auxiliary, without = gradients(batch.targets, **weights), gradients(batch.targets, **none)
    few_with, few_without = gradients(few, **weights), gradients(few, **none)
    for name in without:
        torch.testing.assert_close(
            few_with[name] - few_without[name], with_auxiliary[name] - without[name], rtol=1e-9, atol=1e-12
        )


def test_an_objective_that_is_not_there_yet_is_refused() -> None:
    with pytest.raises(UserError, match="grpo is not there yet"):
        cases.make_run("dense", {}, objective="grpo")
