"""The section of a run that says what is learned from its data, and what of each objective a plan has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.run.declare import key


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned: the next token, an answer, or which of two answers is better."""

    kind: Literal["pretrain", "sft", "dpo", "kto", "orpo", "simpo", "reward", "grpo", "distill"] = key(
        "pretrain", "pretrain: every next token; sft: answers; orpo, simpo: which of two answers is better"
    )
    beta: float = key(0.1, "orpo: weight of the odds ratio; simpo: scale of the margin", above=0)
    gamma: float = key(0.5, "simpo: margin between two answers that is aimed at, on the scale of beta", least=0)
    label_smoothing: float = key(0.0, "simpo: share of pairs taken to be the wrong way round", least=0, most=0.5)


@dataclass(frozen=True)
class ObjectiveFacts:
    """What of an objective decides what a step computes, holds and sends."""

    logprobs: bool = False
    """Its loss is made of log-probabilities, for which the logits are made again in the backward pass (`model/logprobs.py`)."""
    sums: int = 0
    """Numbers of each token that it adds up over documents (`parallel/objective.py`)."""
    pairs: bool = False
    """It compares the two answers of a pair."""
    metrics: tuple[str, ...] = ()
    """What it measures in a step, beside the loss."""


PAIRS = ("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")
FACTS: dict[str, ObjectiveFacts] = {
    "pretrain": ObjectiveFacts(),
    "sft": ObjectiveFacts(),
    "orpo": ObjectiveFacts(logprobs=True, sums=2, pairs=True, metrics=(*PAIRS, "nll")),
    "simpo": ObjectiveFacts(logprobs=True, sums=2, pairs=True, metrics=PAIRS),
}
"""The objectives there are."""
