"""Compares one round of GRPO rollouts with its plan: the engine's memory beside the training state, the bytes sent to update its
weights, and the steps and tokens of a round in which no answer ends early."""

from __future__ import annotations

import numpy as np

from shardwise.ledger import Difference
from shardwise.measure.counts.traffic import TrafficCounter
from shardwise.plan.plan import prompt_tokens
from shardwise.plan.serving.rollouts import answers_at_once, simulated_round
from shardwise.plan.serving.weight_sync import WeightSync, is_whole
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.serve.runner import Runner
from shardwise.train.step import TrainState
from shardwise.tune.rollouts import Rollouts, memory_here, sampling_of
from shardwise.tune.weights import GROUP


def rollouts_against_plan(state: TrainState) -> list[Difference]:
    """Compare the plan of the engine that has most answers with what this rank's engine did. Every rank calls it."""
    run, asked = state.run, state.run.objective
    expected = memory_here(run, state.device, state.mesh.rank)
    simulated = simulated_round(run, expected)
    rollouts = Rollouts(state, frozenset(), owns=asked.asynchronous)
    with TrafficCounter(state.mesh.axes_by_group()) as wire:
        rollouts.update()
    sent = (
        0 if is_whole(run) else WeightSync(run, state.mesh.rank).sent_bytes(DTYPE_BYTES, DTYPE_BYTES[run.train.dtype])
    )
    drawn = np.random.default_rng(0)
    groups = answers_at_once(run) // asked.group
    prompts = [drawn.integers(0, run.model.vocab, prompt_tokens(run)) for _ in range(groups)]
    answers = rollouts.draw(prompts, range(groups), 0, sampling_of(run), asked.group)
    engine, weights = rollouts.engine, rollouts.weights
    assert isinstance(engine.runner, Runner)
    cache = engine.runner.cache.tensors()
    return [
        Difference(
            "rollouts", "bytes weights", float(expected.weights), float(sum(t.nbytes for t in weights.copied.values()))
        ),
        Difference("rollouts", "bytes sent", float(sent), float(wire.traffic[GROUP, "all_to_all"])),
        Difference("rollouts", "bytes cache", float(expected.cache), float(sum(t.nbytes for t in cache))),
        Difference("rollouts", "steps", float(simulated.steps), float(engine.steps)),
        Difference("rollouts", "tokens", float(answers_at_once(run) * asked.completion_tokens), float(answers.count)),
    ]
