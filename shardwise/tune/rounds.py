"""Rounds of answers: prompts in their order, drawn by the engines of the ranks, judged by the user's rewards, and groups from which
there is nothing to learn replaced by others.

A round may be begun ahead of time: its first answers are then drawn in a thread, with weights that the engine holds for itself,
while the round before is learned from. It is finished where it is wanted, in the main thread: judging, exchanging and replacing.
Engines that are cut over GPUs draw them before that instead: kernels of NCCL wait for their peers on the device, and two threads
launch theirs in another order on each rank, so that those of training and those of the engine could wait for each other forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from shardwise.data.prompts import Prompt, Prompts
from shardwise.data.tokenizer import END_NAMES, Tokenizer
from shardwise.run import LayoutConfig, Run
from shardwise.run.served import ServingRank
from shardwise.serve.request import Sampling
from shardwise.train.step import TrainState
from shardwise.tune.advantages import has_variance, overlong_penalty
from shardwise.tune.answers import Answers, as_answers, exchange
from shardwise.tune.rewards import Answered, Rewards
from shardwise.tune.rollouts import Drawn, Rollouts, sampling_of

Item = TypeVar("Item")


@dataclass(frozen=True)
class RoundInFlight:
    """A round under way: its number, and this rank's first answers."""

    number: int
    first: Future[Drawn]


class Rounds:
    """Makes rounds for a train state."""

    def __init__(
        self, state: TrainState, prompts: Prompts, tokenizer: Tokenizer, rewards: Rewards, note: Callable[[int], None]
    ) -> None:
        """`note` is told of progress."""
        self.state, self.prompts, self.tokenizer, self.rewards, self.note = state, prompts, tokenizer, rewards, note
        self.run: Run = state.run
        asked = self.run.objective
        self.ends = ends_of(tokenizer)
        self.rollouts = Rollouts(state, self.ends, owns=asked.asynchronous)
        self.filters = filters(self.run)
        self.size = prompts_of_round(self.run)
        self.thread = (
            ThreadPoolExecutor(1, "rollouts") if asked.asynchronous and self.rollouts.beside_training else None
        )

    def begin(self, number: int) -> RoundInFlight:
        """Draw the first answers of a round, in a thread where that may be, with the weights of this moment."""
        self.rollouts.update()
        first = self.state.history.prompts
        prompts = self._mine(self.prompts.take(np.arange(first, first + self.size)))
        places = self._mine(list(range(self.size)))
        group = self.run.objective.group
        draw = self.rollouts.in_background(prompts, places, number, sampling_of(self.run), group)
        if self.thread is not None:
            return RoundInFlight(number, self.thread.submit(draw))
        drawn = Future[Drawn]()
        drawn.set_result(draw())
        return RoundInFlight(number, drawn)

    def make(self, number: int, begun: RoundInFlight | None = None) -> tuple[Answers, dict[str, Any]]:
        """Draw and judge the answers of a round, or finish one; and figures of it. Every rank calls it."""
        asked, history = self.run.objective, self.state.history
        if begun is None:
            self.rollouts.update()
        began = time.perf_counter()
        kept: list[Answers] = []
        left_out: list[Answers] = []
        every: list[Answers] = []
        missing, seconds = self.size, 0.0
        for attempt in range(asked.filter_rounds if self.filters else 1):
            first = history.prompts
            history.prompts += missing
            prompts = self.prompts.take(np.arange(first, first + missing))
            places = range(attempt * self.size, attempt * self.size + missing)
            drawn = begun.first.result() if begun is not None and not attempt else None
            found, took = self.answer(prompts, places, number, sampling_of(self.run), asked.group, drawn)
            seconds += took
            every.append(found)
            good = np.ones(missing, dtype=bool)
            if self.filters:
                good = has_variance(found.rewards.reshape(-1, asked.group))
            chosen = np.repeat(good, asked.group)
            kept.append(found.take(np.flatnonzero(chosen)))
            left_out.append(found.take(np.flatnonzero(~chosen)))
            missing -= int(good.sum())
            if not missing:
                break
        if missing:  # nothing is learned from these; they only fill rows
            spare = Answers.joined(left_out).take(slice(0, missing * asked.group))
            spare.used[:] = 0
            kept.append(spare)
        drawn_in_all = Answers.joined(every)
        return Answers.joined(kept), {
            "drawn_reward": float(drawn_in_all.rewards.mean()),
            "filtered_groups": sum(len(each) for each in left_out) // asked.group,
            "rollout_seconds": time.perf_counter() - began,
            "rollout_tokens_per_s": float(drawn_in_all.lengths.sum()) / max(seconds, 1e-9),
        }

    def answer(
        self, prompts: list[Prompt], places: range, number: int, sampling: Sampling, group: int, drawn: Drawn | None = None
    ) -> tuple[Answers, float]:  # fmt: skip
        """Answers to prompts, judged, on every rank; and the seconds that this one took to draw its share. What an engine has drawn
        its ranks judge in turns."""
        run, mine, place = self.run, self._mine(prompts), self.rollouts.place
        if drawn is None:
            drawn = self.rollouts.draw([p.tokens for p in mine], self._mine(list(places)), number, sampling, group)
        self.note(drawn.count)
        ranks = place.replica_ranks
        turn = range(ranks.index(place.rank), len(mine), len(ranks))
        mine, drawn = [mine[n] for n in turn], drawn.take(turn, group)
        judged = self.rewards.judge(self._read(mine, drawn, group))
        lengths = np.array([len(each) for each in drawn.tokens], dtype=np.int64)
        penalty = overlong_penalty(lengths, run.objective.completion_tokens, run.objective.overlong_tokens)
        worth = self.rewards.total(judged) + penalty
        own = as_answers([p.tokens for p in mine], drawn, judged, worth, run.train.seq_len, group)
        if run.layout.world > 1:
            own = exchange(own, len(prompts), group, self.state.device, shares_of(place.layout))
        return own, drawn.seconds

    def _mine(self, items: list[Item]) -> list[Item]:
        """The share of this rank's engine."""
        place = self.rollouts.place
        return items[place.replica :: place.layout.replicate]

    def _read(self, prompts: list[Prompt], drawn: Drawn, group: int) -> list[Answered]:
        """Prompts and answers as text."""
        texts = [self.tokenizer.decode(prompt.tokens.tolist()) for prompt in prompts]
        answers = [self.tokenizer.decode([t for t in tokens if t not in self.ends]) for tokens in drawn.tokens]
        return [
            Answered(texts[n // group], answer, prompts[n // group].row) for n, answer in enumerate(answers)
        ]  # fmt: skip


def shares_of(layout: LayoutConfig) -> list[int]:
    """The rank that judges prompts n, n + world, … of a round, by n: engines take prompts in turn, and their ranks take those."""
    engines = [ServingRank(layout, rank).replica_ranks for rank in range(layout.world // layout.pipeline)]
    found = {tuple(ranks): ranks for ranks in engines}
    return [ranks[turn] for turn in range(layout.world // layout.replicate) for ranks in found.values()]


def filters(run: Run) -> bool:
    """Whether groups without a difference are left out."""
    asked = run.objective
    return asked.variant == "dapo" if asked.filter == "auto" else asked.filter


def prompts_of_round(run: Run) -> int:
    """Prompts that a round answers."""
    return run.train.global_batch * run.objective.minibatches // run.objective.group


def ends_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end an answer: the end of a document, and of a turn."""
    return frozenset({tokenizer.end} | {tokenizer.added[name] for name in END_NAMES if name in tokenizer.added})
