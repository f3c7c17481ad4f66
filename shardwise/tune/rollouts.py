"""Answers to prompts by the engine, in the process that trains and with the weights being trained.

What is drawn follows from the seed of the run, the number of the batch, the prompt's place in it and the answer's in its group: not
from the rank that draws it, nor from what else it computes. So a resumed run, or one on other ranks, draws the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwise.data.order import key_of
from shardwise.data.prompts import Prompt
from shardwise.hardware import CHIPS, chip_of_driver_name
from shardwise.hardware.engine_facts import LENDER
from shardwise.model.invariant.network import check_invariant, make_invariant
from shardwise.plan.serving.pool import device_bytes
from shardwise.plan.serving.rollouts import RolloutMemory, as_served, rollout_memory
from shardwise.run import Run, UserError
from shardwise.run.served import ServingRank
from shardwise.serve.engine import Engine
from shardwise.serve.prepare import check_served, runner_of, runner_of_kind
from shardwise.serve.request import Request, Sampling
from shardwise.serve.runner import Runner
from shardwise.train.step import TrainState
from shardwise.tune.stage_runner import StageRunner
from shardwise.tune.weights import RolloutWeights

_DRAWS = 4
"""Keeps this use of the seed apart from others."""


@dataclass(frozen=True)
class Drawn:
    """Answers to some prompts, group by group."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    ended: list[bool]
    """Whether an answer came to its end, and was not cut at its limit."""
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.tokens))

    def take(self, prompts: Sequence[int], group: int) -> Drawn:
        """The answers to some of the prompts."""
        rows = [prompt * group + n for prompt in prompts for n in range(group)]
        tokens, logprobs = [self.tokens[row] for row in rows], [self.logprobs[row] for row in rows]
        return Drawn(tokens, logprobs, [self.ended[row] for row in rows], self.seconds)


class Rollouts:
    """The engine of a rank that trains, or its part of one. All ranks of an engine draw the same, at the same time."""

    def __init__(self, state: TrainState, ends: frozenset[int], owns: bool = False) -> None:
        """`ends` are the tokens that end an answer; `owns`: draw with weights of its own (see `RolloutWeights`)."""
        run = state.run
        check_served(run)
        self.run, self.ends = run, ends
        self.weights = RolloutWeights(state, owns)
        self.weights.update()  # matrices are joined with their values
        if run.serve.invariant:
            check_invariant("serve.invariant", run.model, state.dtype, state.device)
            make_invariant(self.weights.model)
        pages = (
            _lowest(pool_pages(run, state.device), state.device)
            if self.weights.peers
            else pool_pages(run, state.device)
        )
        peers, served = self.weights.peers, as_served(run)
        runner: Runner
        if peers is None:
            runner = runner_of(self.weights.model, served, pages, run.train.seq_len)
        else:
            runner = runner_of_kind(StageRunner, self.weights.model, served, pages, run.train.seq_len, peers)
            runner.join()
        self.place = ServingRank(served.layout, state.mesh.rank)
        """Which engine this rank has, or has a part of."""
        self.weights.follow(runner.model)
        self.engine = Engine(runner, run.serve, pages, seed=run.train.seed)

    @property
    def beside_training(self) -> bool:
        """Whether it may draw while the same rank trains: where its ranks meet over gloo, or there is only one."""
        peers = self.weights.peers
        return peers is None or not peers.recordable

    def update(self) -> None:
        """Take the trainer's values; what was computed with those before is forgotten. Every rank calls it."""
        self.weights.update()
        self.engine.pool.clear()

    def in_background(
        self, prompts: Sequence[Prompt], places: Sequence[int], batch: int, sampling: Sampling, group: int
    ) -> Callable[[], Drawn]:
        """The same for a thread: a GPU draws on a stream of its own, after what the weights are still waiting for."""
        ready = torch.cuda.Event() if self.weights.state.device.type == "cuda" else None
        if ready is not None:
            ready.record()

        def draw() -> Drawn:
            if ready is None:
                return self.draw([p.tokens for p in prompts], places, batch, sampling, group)
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_event(ready)
                drawn = self.draw([p.tokens for p in prompts], places, batch, sampling, group)
                torch.cuda.current_stream().synchronize()
            return drawn

        return draw

    def draw(
        self, prompts: Sequence[NDArray[np.int64]], places: Sequence[int], batch: int, sampling: Sampling, group: int
    ) -> Drawn:
        """`group` answers to each prompt. `places` are the prompts' numbers in a batch of that number."""
        asked = self.run.objective
        began = time.perf_counter()
        for place, prompt in zip(places, prompts, strict=True):
            seed = int(key_of(self.run.train.seed, _DRAWS, batch, place)[0] >> np.uint64(1))
            most = min(asked.completion_tokens, self.run.train.seq_len - len(prompt))
            self.engine.add(
                Request(str(place), tuple(prompt.tolist()), most, replace(sampling, seed=seed), group, self.ends)
            )
        number = {str(place): n * group for n, place in enumerate(places)}
        tokens: list[list[int]] = [[] for _ in range(len(prompts) * group)]
        logprobs: list[list[float]] = [[] for _ in tokens]
        ended = [False] * len(tokens)
        while not self.engine.idle:
            for output in self.engine.step():
                if output.finish == "abort":
                    raise UserError("the model's scores are not finite numbers, so no answer can be drawn from them")
                at = number[output.request] + output.index
                tokens[at] += output.tokens
                logprobs[at] += [each.logprob for each in output.logprobs]
                ended[at] = output.finish == "stop"
        return Drawn(tokens, logprobs, ended, time.perf_counter() - began)


def sampling_of(run: Run) -> Sampling:
    """How a run draws, with the log-probabilities of what was drawn."""
    asked = run.objective
    return Sampling(asked.temperature, asked.top_k, asked.top_p, logprobs=0, drawn_logprobs=True)


def memory_here(run: Run, device: torch.device, rank: int | None = None) -> RolloutMemory:
    """What the plan says of this device: of a rank, or of the one with the least room."""
    chip, total = CHIPS["cpu"], device_bytes(CHIPS["cpu"]) // run.layout.world
    if device.type == "cuda":
        chip = chip_of_driver_name(torch.cuda.get_device_name(device)) or CHIPS[LENDER]
        total = torch.cuda.get_device_properties(device).total_memory
    return rollout_memory(run, chip, total, rank=rank)


def pool_pages(run: Run, device: torch.device) -> int:
    """Pages of keys and values, as the plan has them: what training leaves on this device."""
    memory = memory_here(run, device)
    least = -(-run.train.seq_len // run.serve.page_tokens) + 1
    if memory.pages < least:
        raise UserError(
            f"training takes {memory.training / 2**30:.1f} GiB of this device, which leaves no room for the keys and "
            "values of one answer; use a smaller train.microbatch, layout.recompute, or more ranks"
        )
    return memory.pages


def _lowest(pages: int, device: torch.device) -> int:
    """Of all ranks: those of an engine have the same pages, and devices of one kind not always the same memory."""
    made = torch.tensor(pages, device=device)
    dist.all_reduce(made, op=dist.ReduceOp.MIN)
    return int(made)
