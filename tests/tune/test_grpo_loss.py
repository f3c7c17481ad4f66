"""The loss of GRPO and its variants is that of the papers, written out term by term, and that of TRL, where it is installed."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.run import run_from_dict
from shardwise.train.objectives.grpo import Clip, terms, weights_of
from shardwise.tune.advantages import group_advantages, has_variance, overlong_penalty

VARIANTS = ("grpo", "dr_grpo", "dapo")
LENGTH, GROUP, LONGEST = 7, 4, 9


def drawn_case(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    lengths = [draw.randint(1, LENGTH) for _ in range(2 * GROUP)]
    new = [[draw.uniform(-3, -0.05) for _ in range(LENGTH)] for _ in lengths]

    def shifted() -> list[list[float]]:
        return [[x + draw.uniform(-0.6, 0.6) for x in row] for row in new]

    rewards = [draw.choice([0.0, 0.25, 1.0]) for _ in lengths]
    return dict(lengths=lengths, new=new, old=shifted(), drawn=shifted(), reference=shifted(), rewards=rewards)


def of_papers(case: dict[str, Any], variant: str, clip: Clip) -> float:
    """GRPO's equation 3, with the changes that Dr. GRPO and DAPO make to it, and k3; in plain Python."""
    rewards, total, tokens, losses = case["rewards"], 0.0, 0, []
    for n, length in enumerate(case["lengths"]):
        group = rewards[n // GROUP * GROUP : n // GROUP * GROUP + GROUP]
        mean = sum(group) / GROUP
        advantage = rewards[n] - mean
        if variant != "dr_grpo":
            advantage /= math.sqrt(sum((r - mean) ** 2 for r in group) / (GROUP - 1)) + 1e-4
        own = 0.0
        for t in range(length):
            new, old = case["new"][n][t], case["old"][n][t]
            ratio = math.exp(new - old)
            surrogate = min(ratio * advantage, min(max(ratio, 1 - clip.low), 1 + clip.high) * advantage)
            weight = min(math.exp(old - case["drawn"][n][t]), clip.cap) if clip.cap else 1.0
            off = math.exp(case["reference"][n][t]) / math.exp(new)
            own += -weight * surrogate + clip.beta * (off - math.log(off) - 1)
        losses.append(own / length)
        total, tokens = total + own, tokens + length
    if variant == "grpo":
        return sum(losses) / len(losses)
    return total / (len(losses) * LONGEST) if variant == "dr_grpo" else total / tokens


def ours(case: dict[str, Any], variant: str, clip: Clip, new: Tensor) -> Tensor:
    """As the objective makes it."""
    run = run_from_dict(dict(objective=dict(variant=variant, completion_tokens=LONGEST)))
    lengths = np.array(case["lengths"])
    inside = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    drawn, old, reference = (torch.tensor(case[name], dtype=torch.float64) for name in ("drawn", "old", "reference"))
    advantages = torch.tensor(advantages_of(case, variant))[:, None]
    made = terms(new, advantages, drawn, old, reference if clip.beta else None, clip)
    total = torch.where(inside, made.loss * torch.tensor(weights_of(run, lengths))[:, None], 0).sum()
    return total / (int(lengths.sum()) if variant == "dapo" else len(lengths))


def advantages_of(case: dict[str, Any], variant: str) -> Any:
    return group_advantages(np.reshape(case["rewards"], (-1, GROUP)), variant != "dr_grpo").ravel()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_that_of_the_papers(variant: str) -> None:
    for seed, (beta, cap) in enumerate([(0.0, 0.0), (0.04, 0.0), (0.1, 2.0), (0.0, 1.1)]):
        case, clip = drawn_case(seed), Clip(0.2, 0.28 if variant == "dapo" else 0.2, beta, cap)
        found = ours(case, variant, clip, torch.tensor(case["new"], dtype=torch.float64))
        assert float(found) == pytest.approx(of_papers(case, variant, clip), abs=1e-12)


def test_without_older_probabilities_the_gradient_is_that_of_the_policy() -> None:
    new = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    made = terms(new, torch.tensor([[0.5]]), new.detach(), None, None, Clip(0.2, 0.2, 0.0, 2.0))
    assert made.loss.tolist() == [[-0.5, -0.5]]
    assert not made.clipped.any()
    assert not made.mismatch.any()
    made.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[-0.5, -0.5]]


def trl_loss(case: dict[str, Any], variant: str, clip: Clip, new: Tensor, advantages: Sequence[float]) -> Tensor:
    """What TRL's trainer makes of the same numbers: its own function, with a trainer that has no model."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed").GRPOTrainer
    mask = (torch.arange(LENGTH) < torch.tensor(case["lengths"])[:, None]).double()
    alone = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True)
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None), aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=clip.beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1), loss_type=variant,
        epsilon_low=clip.low, epsilon_high=clip.high, use_vllm=bool(clip.cap), max_completion_length=LONGEST,
        vllm_importance_sampling_correction=bool(clip.cap), model=SimpleNamespace(training=True), accelerator=alone,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, _metrics=dict(train=defaultdict(list)),
    )  # fmt: skip
    old, drawn, reference = (torch.tensor(case[name], dtype=torch.float64) for name in ("old", "drawn", "reference"))
    inputs = dict(
        prompt_ids=torch.zeros(len(mask), 1), prompt_mask=torch.ones(len(mask), 1), completion_ids=torch.zeros_like(mask),
        completion_mask=mask, advantages=torch.tensor(advantages), old_per_token_logps=old, ref_per_token_logps=reference,
        num_items_in_batch=mask.sum(), importance_sampling_ratio=(old - drawn).exp().clamp(max=clip.cap or math.inf),
    )  # fmt: skip
    return trainer._compute_loss(stub, None, inputs)


@pytest.mark.parametrize("variant", [*VARIANTS, "bnpo"])
def test_loss_and_gradient_are_those_of_trl(variant: str) -> None:
    own = "dapo" if variant == "bnpo" else variant  # the same over one batch
    for seed, (beta, cap) in enumerate([(0.0, 0.0), (0.04, 0.0), (0.1, 2.0)]):
        case, clip = drawn_case(seed), Clip(0.2, 0.28, beta, cap)
        found = []
        for theirs in (False, True):
            new = torch.tensor(case["new"], dtype=torch.float64, requires_grad=True)
            loss = (
                trl_loss(case, variant, clip, new, advantages_of(case, own)) if theirs else ours(case, own, clip, new)
            )
            loss.backward()
            assert new.grad is not None
            found.append((float(loss.detach()), new.grad))
        assert found[0][0] == pytest.approx(found[1][0], abs=1e-12)
        assert torch.allclose(found[0][1], found[1][1], atol=1e-12, rtol=0)


def test_groups_without_a_difference_and_long_answers() -> None:
    rewards = np.array([[1.0, 1.0], [0.0, 1.0]])
    assert has_variance(rewards).tolist() == [False, True]
    assert group_advantages(rewards, True)[0].tolist() == [0, 0]
    lengths = np.array([1, 6, 7, 8, 10])
    assert overlong_penalty(lengths, 10, 4).tolist() == [0, 0, -0.25, -0.5, -1]
    assert not overlong_penalty(lengths, 10, 0).any()
