"""Rollouts: the engine answers prompts in the training process, with the weights being trained.

The sampled tokens depend on the run's seed, the number of the batch, the prompt's index in the batch and the answer's index in its
group. They do not depend on the rank that samples them, nor on what else it computes. So a resumed run, or one on other ranks,
samples the same answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwise.data.order import key_of
from shardwise.hardware import CHIPS, chip_of_driver_name
from shardwise.hardware.engine_facts import LENDER
from shardwise.model.invariant.network import check_invariant, make_invariant
from shardwise.plan.serving.pool import device_bytes
from shardwise.plan.serving.rollouts import RolloutMemory, as_served, rollout_memory
from shardwise.run import Run, UserError
from shardwise.run.ranks.served import ServingRank
from shardwise.serve.engine import Engine
from shardwise.serve.prepare import check_served, runner_of, runner_of_kind
from shardwise.serve.request import Request, Sampling
from shardwise.serve.runner import Runner
from shardwise.train.step import TrainState
from shardwise.tune.stage_runner import StageRunner
from shardwise.tune.weights import RolloutWeights

_DRAWS = 4
"""Separates this use of the seed from others."""


@dataclass(frozen=True)
class Drawn:
    """Answers to some prompts, group by group."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    ended: list[bool]
    """Whether an answer ended with an end token, and was not cut at its limit."""
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
    """The engine of a training rank, or its shard of one. All ranks of an engine sample the same answers at the same time."""

    def __init__(self, state: TrainState, ends: frozenset[int], owns: bool = False) -> None:
        """`ends` are the tokens that end an answer; `owns`: use the engine's own copy of the weights (see `RolloutWeights`)."""
        run = state.run
        check_served(run)
        self.run, self.ends = run, ends
        self.weights = RolloutWeights(state, owns)
        self.weights.update()  # the engine joins matrices below and copies their values
        if run.serve.invariant:
            check_invariant("serve.invariant", run.model, state.dtype, state.device)
            make_invariant(self.weights.model)
        peers, served, pages = self.weights.peers, as_served(run), pool_pages(run, state.device)
        if peers is not None:
            pages = _lowest(pages, state.device)
        runner: Runner
        if peers is None:
            runner = runner_of(self.weights.model, served, pages, run.train.seq_len)
        else:
            runner = runner_of_kind(StageRunner, self.weights.model, served, pages, run.train.seq_len, peers)
            runner.join()
        self.place = ServingRank(served.layout, state.mesh.rank)
        """The engine that this rank has, or has a shard of."""
        self.weights.follow(runner.model)
        self.engine = Engine(runner, run.serve, pages, seed=run.train.seed)

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream of what is sampled in the background. PyTorch keeps the freed memory of each stream for that stream."""
        return torch.cuda.Stream()

    @property
    def beside_training(self) -> bool:
        """Whether it may sample while the same rank trains: if its ranks communicate over gloo, or if there is only one."""
        peers = self.weights.peers
        return peers is None or not peers.recordable

    def update(self) -> None:
        """Take over the trainer's weights and drop the KV cache of the old ones. Every rank calls it."""
        self.weights.update()
        self.engine.pool.clear()

    def in_background(
        self, prompts: Sequence[NDArray[np.int64]], places: Sequence[int], batch: int, sampling: Sampling, group: int
    ) -> Callable[[], Drawn]:
        """`draw` as a function for a thread. A GPU samples on its own stream, after the work that the weights still wait for."""
        draw = partial(self.draw, prompts, places, batch, sampling, group)
        if self.weights.state.device.type != "cuda":
            return draw
        stream = self.stream
        ready = torch.cuda.Event()
        ready.record()

        def draw_on_stream() -> Drawn:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                drawn = draw()
                stream.synchronize()
            return drawn

        return draw_on_stream

    def draw(
        self, prompts: Sequence[NDArray[np.int64]], places: Sequence[int], batch: int, sampling: Sampling, group: int
    ) -> Drawn:
        """Sample `group` answers to each prompt. `places` are the prompts' indices in batch number `batch`."""
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
    """A run's sampling parameters, with the log-probabilities of the sampled tokens."""
    asked = run.objective
    return Sampling(asked.temperature, asked.top_k, asked.top_p, logprobs=0, drawn_logprobs=True)


def memory_here(run: Run, device: torch.device, rank: int | None = None) -> RolloutMemory:
    """The plan's memory for this device: of a given rank, or of the rank with the least room."""
    chip, total = CHIPS["cpu"], device_bytes(CHIPS["cpu"]) // run.layout.world
    if device.type == "cuda":
        chip = chip_of_driver_name(torch.cuda.get_device_name(device)) or CHIPS[LENDER]
        total = torch.cuda.get_device_properties(device).total_memory
    return rollout_memory(run, chip, total, rank=rank)


def pool_pages(run: Run, device: torch.device) -> int:
    """Pages of the KV cache, as the plan counts them: the memory that training leaves free on this device."""
    memory = memory_here(run, device)
    least = -(-run.train.seq_len // run.serve.page_tokens) + 1
    if memory.pages < least:
        raise UserError(
            f"training takes {memory.training / 2**30:.1f} GiB of this device, which leaves no room for the keys and "
            "values of one answer; use a smaller train.microbatch, layout.recompute, or more ranks"
        )
    return memory.pages


def _lowest(pages: int, device: torch.device) -> int:
    """The minimum over all ranks: the ranks of an engine need the same number of pages, and devices of one kind do not always have
    the same memory."""
    made = torch.tensor(pages, device=device)
    dist.all_reduce(made, op=dist.ReduceOp.MIN)
    return int(made)
