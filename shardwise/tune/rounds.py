"""Rounds of answers: the ranks' engines sample answers to the prompts, in the prompts' order, the user's reward functions judge
them, and groups with nothing to learn are replaced by others.

A round may be started ahead of time: a thread then samples its first answers, with the engine's own copy of the weights, while
training learns from the previous round. The main thread finishes the round when it is needed: it judges, exchanges and replaces.
Engines that are sharded over GPUs sample these answers before that training instead of beside it. NCCL kernels wait for their peers
on the device, and two threads launch them in a different order on each rank, so that kernels of training and of the engine could
deadlock.
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
from shardwise.run.ranks.served import ServingRank
from shardwise.serve.request import Sampling
from shardwise.train.step import TrainState
from shardwise.tune.advantages import has_variance, overlong_penalty
from shardwise.tune.answers import Answers, as_answers, exchange
from shardwise.tune.rewards import Answered, Rewards
from shardwise.tune.rollouts import Drawn, Rollouts, sampling_of

Item = TypeVar("Item")


@dataclass(frozen=True)
class RoundInFlight:
    """A round in progress: its number, and this rank's first answers."""

    number: int
    first: Future[Drawn]


class Rounds:
    """Makes rounds for a train state."""

    def __init__(
        self, state: TrainState, prompts: Prompts, tokenizer: Tokenizer, rewards: Rewards, note: Callable[[int], None]
    ) -> None:
        """`note` is called to report progress."""
        self.state, self.prompts, self.tokenizer, self.rewards, self.note = state, prompts, tokenizer, rewards, note
        self.run: Run = state.run
        asked = self.run.objective
        self.ends = ends_of(tokenizer)
        self.rollouts = Rollouts(state, self.ends, owns=asked.asynchronous)
        self.filters = filters(self.run)
        self.size = prompts_of_round(self.run)
        beside = asked.asynchronous and self.rollouts.beside_training
        self.thread = ThreadPoolExecutor(1, "rollouts") if beside else None

    def begin(self, number: int) -> RoundInFlight:
        """Sample the first answers of a round with the current weights, in a thread if possible."""
        self.rollouts.update()
        first = self.state.history.prompts
        prompts = self._mine(self.prompts.take(np.arange(first, first + self.size)))
        places = self._mine(list(range(self.size)))
        group = self.run.objective.group
        tokens = [prompt.tokens for prompt in prompts]
        draw = self.rollouts.in_background(tokens, places, number, sampling_of(self.run), group)
        if self.thread is not None:
            return RoundInFlight(number, self.thread.submit(draw))
        drawn = Future[Drawn]()
        drawn.set_result(draw())
        return RoundInFlight(number, drawn)

    def close(self) -> None:
        """End the thread."""
        if self.thread is not None:
            self.thread.shutdown()

    def make(self, number: int, begun: RoundInFlight | None = None) -> tuple[Answers, dict[str, Any]]:
        """Sample and judge the answers of a round, or finish one that has begun. Returns the answers and their figures. Every rank
        calls it."""
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
        if missing:  # these only fill rows, without a loss
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
        """Returns judged answers to the prompts, on every rank, and the seconds that this rank took to sample its share. The ranks
        of an engine take turns in judging its answers."""
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
        """This rank's engine's share of the items."""
        place = self.rollouts.place
        return items[place.replica :: place.layout.replicate]

    def _read(self, prompts: list[Prompt], drawn: Drawn, group: int) -> list[Answered]:
        """Prompts and answers as text."""
        texts = [self.tokenizer.decode(prompt.tokens.tolist()) for prompt in prompts]
        answers = [self.tokenizer.decode([t for t in tokens if t not in self.ends]) for tokens in drawn.tokens]
        return [Answered(texts[n // group], answer, prompts[n // group].row) for n, answer in enumerate(answers)]


def shares_of(layout: LayoutConfig) -> list[int]:
    """Element n is the rank that judges prompts n, n + world, … of a round. Engines take prompts in turn, and the ranks of an
    engine take its prompts in turn."""
    engines = [ServingRank(layout, rank).replica_ranks for rank in range(layout.world // layout.pipeline)]
    found = {tuple(ranks): ranks for ranks in engines}
    return [ranks[turn] for turn in range(layout.world // layout.replicate) for ranks in found.values()]


def filters(run: Run) -> bool:
    """Whether groups whose answers all have the same reward are left out."""
    asked = run.objective
    return asked.variant == "dapo" if asked.filter == "auto" else asked.filter


def prompts_of_round(run: Run) -> int:
    """The number of prompts in a round."""
    return run.train.global_batch * run.objective.minibatches // run.objective.group


def ends_of(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer: end of document and end of turn."""
    return frozenset({tokenizer.end} | {tokenizer.added[name] for name in END_NAMES if name in tokenizer.added})
