"""Losses against TRL's own functions, in float64; skipped where TRL is not installed."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.train.objectives.dpo import dpo_losses
from shardwise.train.objectives.kto import kto_losses
from shardwise.train.objectives.orpo import odds_ratio_losses
from shardwise.train.objectives.reward import reward_losses
from shardwise.train.objectives.simpo import simpo_losses

pytest.importorskip("trl", reason="TRL, whose losses these are held to, is not installed")
EXACT = dict(rtol=1e-9, atol=1e-12)


class Precise(torch.Tensor):
    """A tensor that TRL does not round to float32."""

    def float(self, *_: Any) -> torch.Tensor:  # type: ignore[override]
        return self


def logprobs(seed: int, rows: int = 6, length: int = 9) -> torch.Tensor:
    """Of each token of some answers, wanted ones first."""
    generator = torch.Generator().manual_seed(seed)
    return -torch.rand(rows, length, dtype=torch.float64, generator=generator) * 2


def stub(**more: Any) -> Any:
    """As much of a trainer as its losses ask for."""
    same = lambda x: x  # noqa: E731
    accelerator = SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)
    return SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1, **more,
    )  # fmt: skip


def outputs(values: torch.Tensor) -> Any:
    """What a network gives whose answers have these log-probabilities."""
    ones = torch.ones_like(values)
    return SimpleNamespace(log_probs=values, entropy=ones, mean_logits=ones, is_top1=ones.bool())


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_dpo(kind: str) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    policy, reference = logprobs(0), logprobs(1)
    trainer = stub(
        ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=0.3, loss_types=[kind],
        loss_weights=[1.0], label_smoothing=0.0, use_weighting=False,
    )  # fmt: skip
    mask = torch.ones(6, 10)
    mask[:, 0] = 0
    good, bad = reference.sum(1).chunk(2)
    inputs = dict(
        input_ids=torch.zeros(6, 10, dtype=torch.long), attention_mask=mask, completion_mask=mask, ref_chosen_logps=good,
        ref_rejected_logps=bad,
    )  # fmt: skip
    want = DPOTrainer._compute_loss(trainer, lambda **_: outputs(policy), inputs, False)
    ratios = (policy - reference).sum(1) / (9 if kind == "ipo" else 1)
    chosen, rejected = ratios.chunk(2)
    torch.testing.assert_close(dpo_losses(chosen - rejected, kind, 0.3).mean(), want, **EXACT)


def test_kto() -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    policy, reference, other, other_reference = (logprobs(seed) + seed / 9 for seed in (4, 5, 6, 7))
    labels = torch.tensor([True, False, True, True, False, False])
    trainer = stub(
        precompute_ref_logps=True, calculate_KL=True, loss_type="kto", beta=0.3, desirable_weight=1.3,
        undesirable_weight=0.8, _compute_kl_logps=lambda *_: other.sum(1), args=None,
    )  # fmt: skip
    mask = torch.ones(6, 10)
    mask[:, 0] = 0
    inputs = dict(
        input_ids=torch.zeros(6, 10, dtype=torch.long), attention_mask=mask, completion_mask=mask, label=labels,
        ref_logps=reference.sum(1), ref_KL_logps=other_reference.sum(1),
    )  # fmt: skip
    want = KTOTrainer._compute_loss(trainer, lambda **_: outputs(policy), inputs, False)
    kl = (other - other_reference).sum(1).mean().clamp(min=0)
    losses = kto_losses((policy - reference).sum(1), labels, kl, 0.3, (1.3, 0.8))
    torch.testing.assert_close(losses.mean(), want, **EXACT)


@pytest.mark.parametrize("center", [None, 0.02])
def test_reward(center: float | None) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    scores = logprobs(8, 6, 1)
    trainer = stub(args=SimpleNamespace(center_rewards_coefficient=center))
    inputs = dict(attention_mask=torch.ones(6, 4), margin=torch.full((3,), 0.4, dtype=torch.float64))
    want = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores), inputs)
    chosen, rejected = scores[:, 0].chunk(2)
    torch.testing.assert_close(reward_losses(chosen, rejected, 0.4, center or 0.0).mean(), want, **EXACT)


def test_orpo() -> None:
    orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    chosen, rejected = logprobs(2).mean(1).chunk(2)
    trainer = stub(beta=0.2)
    precise = [each.as_subclass(Precise) for each in (chosen, rejected)]
    want = orpo.ORPOTrainer.odds_ratio_loss(trainer, *precise)[0].as_subclass(torch.Tensor)
    torch.testing.assert_close(-0.2 * odds_ratio_losses(chosen, rejected), want, **EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo(smoothing: float) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    chosen, rejected = logprobs(3).mean(1).chunk(2)
    trainer = stub(beta=2.0, simpo_gamma=0.7, loss_type="simpo", label_smoothing=smoothing, alpha=0.0)
    want = cpo.CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]
    torch.testing.assert_close(simpo_losses(chosen, rejected, 2.0, 0.7, smoothing), want, **EXACT)
