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
        "pretrain: every next token; sft: only answers; dpo, orpo, simpo: from pairs of answers; "
        "kto: from good and bad answers; reward: a reward model, from pairs; grpo: from rewards for the model's own answers; "
        "distill: from another model's predictions",
    )
    loss: Literal["sigmoid", "ipo", "hinge"] = key("sigmoid", "dpo: loss function of a pair's margin")
    beta: float = key(
        0.1,
        "dpo, kto: strength of the pull towards the reference; orpo: weight of the odds ratio; simpo: scale of the reward",
        above=0,
    )
    gamma: float = key(0.5, "simpo: target margin between the two answers, on the scale of beta", least=0)
    label_smoothing: float = key(
        0.0, "dpo (sigmoid), simpo: assumed share of pairs with swapped labels", least=0, most=0.5
    )
    reference: str = key(
        "",
        "dpo, kto: checkpoint or run folder of the reference model; empty: the initial weights",
    )
    margin: float = key(0.0, "reward: target margin between the scores of the chosen and the rejected answer", least=0)
    margins: bool = key(
        False,
        "reward, dpo (sigmoid): add the `margin` of each row of data to the target margin",
    )
    center: float = key(0.0, "reward: weight of the squared sum of both scores, which centers them at 0", least=0)
    desirable_weight: float = key(1.0, "kto: weight of good answers", least=0)
    undesirable_weight: float = key(1.0, "kto: weight of bad answers", least=0)
    stored: bool = key(
        False,
        "dpo, distill: read the scores of the reference or teacher from the data, where `shardwise data score` stored them; no "
        "second network is loaded",
    )

    teacher: str = key("", "distill: checkpoint or run folder of the teacher; a plan also takes the name of a preset")
    divergence: Literal["forward", "reverse"] = key(
        "forward",
        "distill: forward: KL(teacher || student), which covers everything the teacher says; reverse: KL(student || teacher), "
        "which stays with what the teacher finds likely",
    )
    teacher_tokens: int = key(
        64,
        "distill: compare this many of the teacher's likeliest tokens one by one and the rest as one; 0: every token",
        least=0,
    )
    cross_entropy: float = key(
        0.0, "distill: weight of the cross-entropy on the data's tokens, added to the divergence", least=0
    )

    rewards: tuple[str, ...] = key(
        (), "grpo: reward functions, as file.py:name; each takes (prompt, completion, row) and returns a number"
    )
    reward_weights: tuple[float, ...] = key((), "grpo: weight of each reward in the sum; empty: 1 each")
    reward_seconds: float = key(10.0, "grpo: time limit of one reward call, in seconds", above=0)
    group: int = key(8, "grpo: answers per prompt; they are compared with each other", least=2)
    completion_tokens: int = key(
        256, "grpo: most tokens of an answer; prompt and answer together fit in train.seq_len", least=1
    )
    temperature: float = key(
        1.0, "grpo: sampling temperature; distill: the logits of both models are divided by it", above=0
    )
    top_p: float = key(
        1.0, "grpo: sample from the likeliest tokens whose probabilities add up to this", above=0, most=1
    )
    top_k: int = key(0, "grpo: sample from this many of the likeliest tokens; 0: from all", least=0)
    variant: Literal["grpo", "dr_grpo", "dapo"] = key(
        "grpo",
        "grpo: advantages divided by the group's standard deviation, loss averaged over each answer; dr_grpo: neither; dapo: loss "
        "averaged over all tokens, a higher upper clip, and groups with equal rewards left out",
    )
    epsilon: float = key(0.2, "grpo: clip range of the probability ratio around 1", above=0)
    epsilon_high: float = key(0.0, "grpo: upper clip range; 0: 0.28 for dapo, else epsilon", least=0)
    kl_beta: float = key(
        0.0, "grpo: weight of the KL divergence from the initial weights; 0: no reference model", least=0
    )
    filter: Literal["auto", True, False] = key(
        "auto",
        "grpo: leave out groups whose answers all have the same reward, and draw more prompts; auto: only for dapo",
    )
    filter_rounds: int = key(4, "filter: most rounds of prompts that are drawn for one batch", least=1)
    overlong_tokens: int = key(
        0,
        "grpo: an answer within this many tokens of the limit loses up to 1 of its reward (DAPO); 0: no penalty",
        least=0,
    )
    pack: bool = key(
        False,
        "grpo: pack several answers into a row, without attention between them; a step computes only the rows it needs",
    )
    minibatches: int = key(1, "grpo: optimizer steps per round; each takes an equal part of the answers", least=1)
    iterations: int = key(1, "grpo: passes over the answers of a round", least=1)
    asynchronous: bool = key(
        False, "grpo: generate the next answers during training, with weights that are one round old"
    )
    importance_cap: float = key(
        2.0,
        "grpo: cap of the importance weight, the trainer's probability of a token over the engine's; 0: no such weight",
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
    """Its loss is made of scores (`ScoreHead` of `model/loss.py`), at the last token of each document."""
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
