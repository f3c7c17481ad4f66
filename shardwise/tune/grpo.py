"""The source of batches of a GRPO run: a round of answers, sampled with the current weights and judged, becomes the batches of one
or several steps.

A round depends on the seed, the weights and the number of prompts used before. That number is saved with the history of a run, so a
run that was killed samples the same answers again from its checkpoint. If a checkpoint falls between the steps of one round, or the
next round was sampled ahead with older weights, the checkpoint holds the answers themselves. After a rollback that left out a step
of a round, the round has another number, and so other answers: those of the checkpoint are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.data.open import open_prompts
from shardwise.data.tokenizer import Tokenizer
from shardwise.run import Run
from shardwise.serve.request import Sampling
from shardwise.train.batches.source import Note
from shardwise.train.objectives.grpo import AnswerBatch
from shardwise.train.step import TrainState
from shardwise.tune.answers import Answers, batch_of, packing_of, tokens_of
from shardwise.tune.logprobs import Reference, answer_logprobs
from shardwise.tune.rewards import Rewards
from shardwise.tune.rounds import RoundInFlight, Rounds, prompts_of_round

GREEDY = Sampling(0.0, logprobs=0)
NOW, NEXT, FIGURES, NUMBERS = "now/", "next/", "figures", "numbers"
"""A checkpoint's keys for the current round's answers, those of the round made ahead, the latter's figures, and both numbers."""


class GrpoSource:
    """Batches of answers."""

    def __init__(self, run: Run) -> None:
        asked = run.objective
        self.run = run
        self.rewards = Rewards(asked.rewards, asked.reward_weights, asked.reward_seconds)
        data = open_prompts(run)
        self.prompts, self.held_out = data.train, data.validation
        self.tokenizer: Tokenizer = data.tokenizer
        self.fingerprint, self.too_long = data.fingerprint, data.too_long
        self.steps_of_round = asked.minibatches * asked.iterations

    def describe(self) -> str:
        return (
            f"data: {self.prompts.count:,} prompts an epoch, {self.held_out.count:,} for validation; a round is "
            f"{self.run.objective.group} answers to each of {prompts_of_round(self.run)}, judged by {', '.join(self.rewards.names)}"
            + (f"; {self.too_long:,} prompts are left out, which leave no room for an answer" if self.too_long else "")
        )

    def attach(self, state: TrainState, log: Callable[[str], None], note: Note) -> None:
        self.state = state
        self.rounds = Rounds(state, self.prompts, self.tokenizer, self.rewards, note)
        self.reference = Reference(state, self.tokenizer, log) if self.run.objective.kl_beta else None
        first = self.first_of_round(state.step + 1)
        following = first if state.step % self.steps_of_round == 0 else first + self.steps_of_round
        numbers = [self.number_of(first), self.number_of(following)]
        now, ahead = state.kept[NUMBERS].tolist() if NUMBERS in state.kept else numbers
        self.answers = _kept(state.kept, NOW) if now == numbers[0] else None
        self.ahead: RoundInFlight | tuple[Answers, dict[str, Any]] | None = None
        made = _kept(state.kept, NEXT) if ahead == numbers[1] else None
        if made is not None:
            figures = state.kept[FIGURES].tolist()
            self.ahead = made, {"drawn_reward": figures[0], "filtered_groups": int(figures[1])}
        self._figures: dict[str, Any] = {}
        self._of_round: dict[str, Any] = {}

    def detach(self) -> None:
        if isinstance(self.ahead, RoundInFlight):
            self.ahead.first.result()
        self.rounds.close()
        del self.state, self.rounds, self.reference, self.answers, self.ahead

    def batches(self, last: int) -> Iterator[Batch]:
        run, state = self.run, self.state
        size = run.train.global_batch
        for step in range(state.step + 1, last + 1):
            begin = self.first_of_round(step)
            part = step - begin
            if part == 0 or self.answers is None:
                self.answers, self._of_round = self.next_round(self.number_of(begin))
                if run.objective.asynchronous:
                    self.ahead = self.rounds.begin(self.number_of(begin + self.steps_of_round))
                self.add_logprobs(self.answers)
            first = part % run.objective.minibatches * size
            own = self.answers.take(slice(first, first + size))
            self._figures, self._of_round = self.worth(own) | self._of_round, {}
            yield self.batch(own)

    def first_of_round(self, step: int) -> int:
        """The first step that learns from the same round as this one."""
        return step - (step - 1) % self.steps_of_round

    def number_of(self, first: int) -> int:
        """The number of the round of answers that begins with this step. It is another one once a step of the round, or one before,
        was left out as bad."""
        more = self.steps_of_round - 1
        return self.state.history.batch_of(first + more) - more

    def next_round(self, number: int) -> tuple[Answers, dict[str, Any]]:
        """The answers of the next round: made ahead, or made now."""
        self.finish_ahead()
        if isinstance(self.ahead, tuple):
            found, self.ahead = self.ahead, None
            return found
        return self.rounds.make(number)

    def finish_ahead(self) -> None:
        """Finish the round that was begun ahead: the engine is then free for other weights."""
        if isinstance(self.ahead, RoundInFlight):
            self.ahead = self.rounds.make(self.ahead.number, self.ahead)

    def batch(self, answers: Answers) -> AnswerBatch:
        """This rank's share of the batch of a step that learns from these answers."""
        packing = packing_of(answers, self.run)
        rows = self.state.samples(np.arange(len(answers) if packing is None else packing.rows))
        return batch_of(answers, rows, self.run, self.tokenizer.end, packing)

    def add_logprobs(self, answers: Answers) -> None:
        """Store the answers' log-probabilities before any update: the reference's, and the trainer's own if several steps learn
        from a round."""
        if self.reference is not None:
            with self.reference.in_place():
                answers.reference = self.logprobs(answers)
        if self.steps_of_round > 1:
            answers.old = self.logprobs(answers)

    def logprobs(self, answers: Answers) -> NDArray[np.float64]:
        """The log-probabilities of answers by the trainer's current network, [answers, length]."""
        size = self.run.train.global_batch
        parts = [answers.take(slice(n, n + size)) for n in range(0, len(answers), size)]
        found = []
        for part in parts:
            values, packing = answer_logprobs(self.state, self.batch(part)), packing_of(part, self.run)
            found.append(values if packing is None else packing.unlay(values))
        return np.concatenate(found)

    def worth(self, answers: Answers) -> dict[str, Any]:
        """Figures of answers: rewards and lengths."""
        groups, packing = answers.rewards.reshape(-1, self.run.objective.group), packing_of(answers, self.run)
        found = {"reward": float(answers.rewards.mean()), "reward_std": float(groups.std(axis=1, ddof=1).mean())}
        for name, column in zip(self.rewards.names, answers.judged.T, strict=True):
            found[f"reward/{name}"] = float(column.mean())
        found["step_tokens"] = tokens_of(answers)
        if packing is not None:
            found["packed_rows"] = packing.rows
        found["completion_tokens"] = float(answers.lengths.mean())
        found["completion_cut"] = float(1 - answers.ended.mean())
        return found

    def figures(self) -> dict[str, Any]:
        return self._figures

    def evaluate(self) -> tuple[dict[str, float], str]:
        """The rewards of greedy answers to some held-out prompts."""
        self.finish_ahead()
        count = min(self.held_out.count, self.run.train.eval_sequences)
        self.rounds.rollouts.update()
        answers, _ = self.rounds.answer(self.held_out.take(np.arange(count)), range(count), 0, GREEDY, 1)
        found = {"eval_reward": float(answers.rewards.mean())}
        for name, column in zip(self.rewards.names, answers.judged.T, strict=True):
            found[f"eval_reward/{name}"] = float(column.mean())
        several = ", ".join(f"{name} {value:.3f}" for name, value in found.items() if "/" in name)
        return found, f"validation reward {found['eval_reward']:.4f}" + (f" ({several})" if len(found) > 2 else "")

    def before_saving(self) -> None:
        self.finish_ahead()
        self.state.kept = {}
        if self.state.step % self.steps_of_round and self.answers is not None:
            self.state.kept |= {NOW + name: tensor for name, tensor in self.answers.tensors().items()}
        if isinstance(self.ahead, tuple):
            answers, figures = self.ahead
            self.state.kept |= {NEXT + name: tensor for name, tensor in answers.tensors().items()}
            known = [figures["drawn_reward"], figures["filtered_groups"]]
            self.state.kept[FIGURES] = torch.tensor(known, dtype=torch.float64)
        if self.state.kept:
            first = self.first_of_round(self.state.step)
            numbers = [self.number_of(first), self.number_of(first + self.steps_of_round)]
            self.state.kept[NUMBERS] = torch.tensor(numbers)


def _kept(tensors: dict[str, Tensor], prefix: str) -> Answers | None:
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return Answers.of_tensors(found) if found else None
