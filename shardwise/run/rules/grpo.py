"""Consistency rules of a GRPO run, which learns from its own rollouts."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.run.config import Run
from shardwise.run.problems import counted
from shardwise.run.rules.rule import Rule

# fmt: off


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
