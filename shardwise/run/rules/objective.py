"""Consistency rules of what a run learns from, of GRPO with its own rollouts, and of text samples at evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.run.config import Run
from shardwise.run.problems import counted
from shardwise.run.rules.rule import Rule

SAMPLED = ("pretrain", "sft", "distill")
"""Objectives whose network continues texts of the validation set."""
PROMPT_TOKENS = 32
"""Tokens of a validation sequence that form a sample's prompt, at most a quarter of a row."""

# fmt: off


def objective_rules(run: Run) -> Iterator[Rule]:
    """Rules of `[objective]`, whatever its kind."""
    kind = run.objective.kind
    rewards = kind == "reward"
    yield Rule(run.model.scores and not rewards, "model.scores", ("objective.kind",),
               lambda: f"only objective.kind = reward trains a head of scores, not {kind}")
    aims = rewards or (kind == "dpo" and run.objective.loss == "sigmoid")
    yield Rule(run.objective.margins and not aims, "objective.margins", ("objective.kind", "objective.loss"),
               lambda: f"{kind} has no margins per pair; only reward and dpo with loss = sigmoid have them")
    yield Rule(rewards and run.train.invariant, "objective.kind", ("train.invariant",),
               lambda: "reward does not support train.invariant: it computes no log-probabilities; turn train.invariant off")


def grpo_rules(run: Run) -> Iterator[Rule]:
    """Rules of objective.kind = grpo."""
    o, train = run.objective, run.train
    if o.kind != "grpo":
        return
    yield Rule(not o.rewards, "objective.rewards", (),
               lambda: 'is empty, but grpo needs a reward; give functions as "file.py:name"')
    yield Rule(o.reward_weights and len(o.reward_weights) != len(o.rewards), "objective.reward_weights", ("objective.rewards",),
               lambda: f"has {counted(len(o.reward_weights), 'number')} for {counted(len(o.rewards), 'reward')}")
    yield Rule(train.global_batch % o.group, "train.global_batch", ("objective.group",), lambda: (
        f"{train.global_batch} answers is not a multiple of objective.group = {o.group}"
    ))
    yield Rule(o.completion_tokens >= train.seq_len, "objective.completion_tokens", ("train.seq_len",), lambda: (
        f"{o.completion_tokens} leaves no room for a prompt in train.seq_len = {train.seq_len}"
    ))
    yield Rule(o.kl_beta > 0 and not train.weights, "objective.kl_beta", ("train.weights",), lambda: (
        "compares with the initial weights, but train.weights is empty; set it, or use kl_beta = 0"
    ))
    yield Rule(o.epsilon >= 1, "objective.epsilon", (), lambda: "must be below 1: a probability ratio is always above 0")
    yield Rule(o.overlong_tokens > o.completion_tokens, "objective.overlong_tokens", ("objective.completion_tokens",),
               lambda: f"{o.overlong_tokens} is more than objective.completion_tokens = {o.completion_tokens}")
    yield Rule(o.pack and train.invariant, "objective.pack", ("train.invariant",),
               lambda: "does not go with train.invariant: packed rows add in another order than the engine; use one of the two")
    yield Rule(o.pack and run.memory.hosts_optimizer, "objective.pack", ("memory.optimizer",),
               lambda: "does not go with memory.optimizer = host: it needs the same number of microbatches in every step")
    yield Rule(train.invariant and not run.serve.invariant, "train.invariant", ("serve.invariant",),
               lambda: "needs serve.invariant too: without it the engine samples from other bits; set both or none")


def prompt_tokens(run: Run) -> int:
    """The number of tokens of a validation sequence that form a sample's prompt."""
    return min(PROMPT_TOKENS, max(1, run.train.seq_len // 4))


def sample_rules(run: Run) -> Iterator[Rule]:
    """Rules of train.samples. The sizes of the layout may be arrays."""
    train, lay = run.train, run.layout
    if not train.samples:
        return
    yield Rule((lay.tensor > 1) | (lay.pipeline > 1) | (lay.context > 1), "train.samples",
               ("layout.tensor", "layout.pipeline", "layout.context"), lambda: (
        "works only without tensor, pipeline and context parallelism; set it to 0, and use `shardwise generate` with a "
        "checkpoint"
    ))
    yield Rule(run.objective.kind not in SAMPLED or run.model.scores, "train.samples", ("objective.kind",),
               lambda: f"continues texts of the validation set; objective.kind = {run.objective.kind} has none; set it to 0")
    yield Rule(not train.eval_every, "train.samples", ("train.eval_every",),
               lambda: "are written at evaluations, but train.eval_every is 0")
    yield Rule(prompt_tokens(run) + train.sample_tokens > train.seq_len, "train.sample_tokens", ("train.seq_len",), lambda: (
        f"{train.sample_tokens} plus {prompt_tokens(run)} tokens of prompt is more than train.seq_len = {train.seq_len}"
    ))
