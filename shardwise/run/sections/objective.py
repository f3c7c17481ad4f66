"""The section of a run that says what is learned from its data, and what of each objective a plan has to know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.run.sections.declare import key


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned: the next token, an answer, or which of two answers is better."""

    kind: Literal["pretrain", "sft", "dpo", "kto", "orpo", "simpo", "reward", "grpo", "distill"] = key(
        "pretrain",
        "pretrain: every next token; sft: answers; dpo, orpo, simpo: which of two answers is better; "
        "kto: whether an answer is wanted; reward: a score of answers, from pairs; grpo: from rewards of its own answers; "
        "distill: what another model would say",
    )
    loss: Literal["sigmoid", "ipo", "hinge"] = key("sigmoid", "dpo: the loss of the margin of a pair")
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
    margins: bool = key(
        False,
        "reward, dpo (sigmoid): the wanted answer is to be ahead by the `margin` of its row, beside objective.margin",
    )
    center: float = key(0.0, "reward: weight of the squared sum of both scores, which keeps them around 0", least=0)
    desirable_weight: float = key(1.0, "kto: weight of wanted answers", least=0)
    undesirable_weight: float = key(1.0, "kto: weight of unwanted answers", least=0)
    stored: bool = key(
        False,
        "dpo, distill: the scores of the reference or the teacher are stored beside the data, by `shardwise data score`; no second "
        "network is loaded",
    )

    teacher: str = key(
        "", "distill: checkpoint or run folder of the model that is learned from; for a plan also the name of a preset"
    )
    divergence: Literal["forward", "reverse"] = key(
        "forward",
        "distill: KL divergence of the student from the teacher, which covers all that the teacher would say; or the reverse, "
        "which keeps to what the teacher finds likely",
    )
    teacher_tokens: int = key(
        64,
        "distill: the teacher's likeliest tokens that are compared one by one, all others as one; 0: every token",
        least=0,
    )
    cross_entropy: float = key(
        0.0, "distill: weight of the cross-entropy of the data's own tokens beside the divergence", least=0
    )

    rewards: tuple[str, ...] = key(
        (), "grpo: functions that judge an answer, file.py:name, of (prompt, completion, row), which return a number"
    )
    reward_weights: tuple[float, ...] = key((), "grpo: what each reward weighs in the sum; empty: 1 each")
    reward_seconds: float = key(10.0, "grpo: what one call of a reward may take", above=0)
    group: int = key(8, "grpo: answers to each prompt, which are compared with each other", least=2)
    completion_tokens: int = key(
        256, "grpo: tokens of an answer at most; with its prompt it fits train.seq_len", least=1
    )
    temperature: float = key(
        1.0, "grpo: of the draws; distill: by which the logits of both models are divided", above=0
    )
    top_p: float = key(1.0, "grpo: draw from the likeliest tokens that have this probability together", above=0, most=1)
    top_k: int = key(0, "grpo: draw from so many of the likeliest tokens; 0: from all", least=0)
    variant: Literal["grpo", "dr_grpo", "dapo"] = key(
        "grpo",
        "grpo: advantages by the group's deviation and the mean over each answer; dr_grpo: neither; dapo: the mean over all "
        "tokens, a higher upper clip, and groups without a difference left out",
    )
    epsilon: float = key(0.2, "grpo: how far the ratio of probabilities may leave 1 before it is clipped", above=0)
    epsilon_high: float = key(0.0, "grpo: the same upwards; 0: 0.28 for dapo, else epsilon", least=0)
    kl_beta: float = key(
        0.0, "grpo: weight of the KL divergence from the weights that training begins with; 0: no reference", least=0
    )
    filter: Literal["auto", True, False] = key(
        "auto", "grpo: leave out groups whose answers are worth the same, and draw further prompts; auto: so for dapo"
    )
    filter_rounds: int = key(
        4, "grpo: how often, at most, prompts are drawn for one batch when groups are left out", least=1
    )
    overlong_tokens: int = key(
        0, "grpo: answers within so many tokens of the longest lose up to 1 of their reward (DAPO); 0: none do", least=0
    )
    pack: bool = key(
        False,
        "grpo: put several answers into a row, which do not see each other, and compute as many rows as that takes",
    )
    minibatches: int = key(1, "grpo: optimizer steps that the answers of one round are divided over", least=1)
    iterations: int = key(1, "grpo: how often each answer is learned from", least=1)
    asynchronous: bool = key(
        False, "grpo: make the next answers while these are learned from, with weights that are one round older"
    )
    importance_cap: float = key(
        2.0,
        "grpo: terms are weighed by the trainer's probability over that of the engine that drew the token, up to this; 0: not",
        least=0,
    )


@dataclass(frozen=True)
class ObjectiveFacts:
    """What of an objective decides what a step computes, holds and sends."""

    logprobs: bool = False
    """Its loss is made of log-probabilities, for which the logits are recomputed in the backward pass (`model/logprobs.py`)."""
    sums: int = 0
    """Numbers of each token that it adds up over documents (`parallel/objective.py`)."""
    scores: bool = False
    """Its loss is made of scores (`model/score.py`), at the last token of each document."""
    reference: int = 0
    """Forward passes in a step of a frozen second network, before the step's own."""
    teacher: bool = False
    """That network is one of its own sizes, of which the likeliest tokens are asked."""
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
    "grpo": ObjectiveFacts(logprobs=True, metrics=("kl", "clip_fraction", "mismatch", "mismatch_kl")),
    "simpo": ObjectiveFacts(logprobs=True, sums=2, pairs=True, metrics=PAIRS),
    "distill": ObjectiveFacts(logprobs=True, reference=1, teacher=True, metrics=("kl", "nll")),
}
"""The objectives there are."""


def facts_of(objective: ObjectiveConfig) -> ObjectiveFacts:
    """Those of an objective as it is set: margins are added up too, and what is stored needs no second network."""
    facts = FACTS[objective.kind]
    facts = replace(facts, sums=facts.sums + 1) if objective.margins else facts
    return replace(facts, reference=0) if objective.stored else facts


def targets_of(objective: ObjectiveConfig, vocab: int) -> int:
    """Tokens whose log-probabilities a loss is made of, at each place: the data's own, and those of a teacher."""
    return 1 + (min(objective.teacher_tokens or vocab, vocab) if objective.kind == "distill" else 0)
