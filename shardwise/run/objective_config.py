"""The section of a run that says what is learned from its data, and what of each objective a plan has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.run.declare import key


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned: the next token, an answer, or which of two answers is better."""

    kind: Literal["pretrain", "sft", "dpo", "kto", "orpo", "simpo", "reward", "grpo", "distill"] = key(
        "pretrain",
        "pretrain: every next token; sft: answers; dpo, orpo, simpo: which of two answers is better; "
        "kto: whether an answer is wanted; reward: a score of answers, from pairs",
    )
    loss: Literal["sigmoid", "ipo", "hinge"] = key("sigmoid", "dpo: what is made of the margin of a pair")
    beta: float = key(
        0.1, "dpo, kto: how close to stay to the reference; orpo: weight of the odds; simpo: scale", above=0
    )
    gamma: float = key(0.5, "simpo: margin between two answers that is aimed at, on the scale of beta", least=0)
    label_smoothing: float = key(
        0.0, "dpo (sigmoid), simpo: share of pairs taken to be the wrong way round", least=0, most=0.5
    )
    reference: str = key(
        "",
        "dpo, kto: checkpoint or run folder of the model not to stray from; empty: what training begins with",
    )
    margin: float = key(0.0, "reward: by how much the score of the wanted answer is to be higher", least=0)
    center: float = key(0.0, "reward: weight of the squared sum of both scores, which keeps them around 0", least=0)
    desirable_weight: float = key(1.0, "kto: weight of wanted answers", least=0)
    undesirable_weight: float = key(1.0, "kto: weight of unwanted answers", least=0)


@dataclass(frozen=True)
class ObjectiveFacts:
    """What of an objective decides what a step computes, holds and sends."""

    logprobs: bool = False
    """Its loss is made of log-probabilities, for which the logits are made again in the backward pass (`model/logprobs.py`)."""
    sums: int = 0
    """Numbers of each token that it adds up over documents (`parallel/objective.py`)."""
    scores: bool = False
    """Its loss is made of scores (`model/score.py`), at the last token of each document."""
    reference: int = 0
    """Forward passes in a step of a frozen second network, before the step's own."""
    forward_only: int = 0
    """Passes of the trained network besides, of which nothing is learned."""
    labels: bool = False
    """It learns from answers with a verdict."""
    pairs: bool = False
    """It compares the two answers of a pair."""
    metrics: tuple[str, ...] = ()
    """What it measures in a step, beside the loss."""


PAIRS = ("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")
VERDICTS = ("rewards_chosen", "rewards_rejected", "desirable", "kl")
FACTS: dict[str, ObjectiveFacts] = {
    "pretrain": ObjectiveFacts(),
    "sft": ObjectiveFacts(),
    "dpo": ObjectiveFacts(logprobs=True, sums=3, reference=1, pairs=True, metrics=PAIRS),
    "kto": ObjectiveFacts(logprobs=True, sums=4, reference=2, forward_only=1, labels=True, metrics=VERDICTS),
    "orpo": ObjectiveFacts(logprobs=True, sums=2, pairs=True, metrics=(*PAIRS, "nll")),
    "reward": ObjectiveFacts(scores=True, sums=2, pairs=True, metrics=PAIRS),
    "simpo": ObjectiveFacts(logprobs=True, sums=2, pairs=True, metrics=PAIRS),
}
"""The objectives there are."""
