"""A round of answers of a run that learns from them, held against its plan: what the engine holds beside the training state, and
the steps and tokens of a round in which no answer ends early."""

from __future__ import annotations

import numpy as np

from shardwise.ledger import Difference
from shardwise.plan.serving.rollouts import answers_at_once, played_round, prompt_tokens
from shardwise.serve.runner import Runner
from shardwise.train.step import TrainState
from shardwise.tune.rollouts import Rollouts, memory_here, sampling_of


def rollouts_against_plan(state: TrainState) -> list[Difference]:
    """What was planned of a rank with most answers, and what it did. Every rank calls it."""
    run, asked = state.run, state.run.objective
    expected = memory_here(run, state.device)
    played = played_round(run, expected)
    rollouts = Rollouts(state, frozenset(), owns=asked.asynchronous)
    drawn = np.random.default_rng(0)
    groups = answers_at_once(run) // asked.group
    prompts = [drawn.integers(0, run.model.vocab, prompt_tokens(run)) for _ in range(groups)]
    answers = rollouts.draw(prompts, range(groups), 0, sampling_of(run), asked.group)
    engine, weights = rollouts.engine, rollouts.weights
    own = {id(tensor): tensor for _, tensor in weights.copied}
    own |= {id(part): part for parts in weights.parts.values() for part in parts.values() if part is not None}
    assert isinstance(engine.runner, Runner)
    cache = engine.runner.cache.tensors()
    return [
        Difference("rollouts", "bytes weights", float(expected.weights), float(sum(t.nbytes for t in own.values()))),
        Difference("rollouts", "bytes cache", float(expected.cache), float(sum(t.nbytes for t in cache))),
        Difference("rollouts", "steps", float(played.steps), float(engine.steps)),
        Difference("rollouts", "tokens", float(answers_at_once(run) * asked.completion_tokens), float(answers.count)),
    ]
