"""The ranks of one engine: the first schedules, and what it asks of its runner the runners of the others do too.

A step is one message to each of the others, with all that is asked since the last: which slots were given to whom, which pages
changed, what to swap and copy, and the rows to compute. The ranks then meet in the collectives of the forward pass. Tensor ranks
pick the same tokens from the same logits; of a pipeline's stages the first rank has the last one, so what is picked is known where
the scheduler is.

A CPU computes where it is called, and would keep the scheduler from the next step while it waits for the stages before its own. So
there, the first rank computes its part of a step when it is read.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shardwise.serve.request import Sampling
from shardwise.serve.runner import Launched, Row, Runner

Calls = list[tuple[str, tuple[Any, ...]]]
"""Methods of a runner, or of its sampler where they begin with a dot, and their arguments."""


class Leader:
    """What an engine has for a runner, where several ranks have one each."""

    def __init__(self, runner: Runner, followers: Sequence[Connection], stages: int = 1) -> None:
        self.runner, self.followers, self.stages = runner, followers, stages
        self.model, self.longest, self.sequences, self.gpu = runner.model, runner.longest, runner.sequences, runner.gpu
        self.sampler = _ToldSampler(self)
        self.asked: Calls = []
        self.later: deque[tuple[Calls, _Later]] = deque()

    def set_pages(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """As a runner's."""
        if changes:
            self.asked.append(("set_pages", (changes,)))

    def swap(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]], host_pages: int) -> None:
        """As a runner's."""
        if out or back:
            self.asked.append(("swap", (out, back, host_pages)))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As a runner's."""
        if pairs:
            self.asked.append(("copy_pages", (pairs,)))

    def launch(self, rows: list[Row], masks: np.ndarray | None = None, keep_logits: bool = False) -> Launched:
        """As a runner's, on all ranks."""
        calls = self._tell("launch", (rows, masks, keep_logits))
        if self.stages == 1 or self.gpu:
            return perform(self.runner, calls)
        later = _Later(self)
        self.later.append((calls, later))
        return later

    def warm(self, step_tokens: int) -> None:
        """As a runner's, on all ranks."""
        perform(self.runner, self._tell("warm", (step_tokens,)))

    def close(self) -> None:
        """Let the other ranks go."""
        for connection in self.followers:
            connection.send_bytes(pickle.dumps(None))

    def _tell(self, name: str, arguments: tuple[Any, ...]) -> Calls:
        calls, self.asked = [*self.asked, (name, arguments)], []
        message = pickle.dumps([*calls[:-1], (name, _packed(arguments) if name == "launch" else arguments)])
        for connection in self.followers:
            connection.send_bytes(message)
        return calls


def _packed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a launch, with rows as plain tuples: a fraction of the work to send."""
    rows, *rest = arguments
    return [(row.slot, row.start, row.tokens, row.count, row.samples) for row in rows], *rest


class _ToldSampler:
    """The sampler of a leader: what slots are given is told with the step."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def assign(self, slot: int, sampling: Sampling, seed: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """As a sampler's."""
        self._leader.asked.append((".assign", (slot, sampling, seed, list(prompt), list(generated))))


class _Later(Launched):
    """A step that the other stages have begun, to be computed here when it is read."""

    def __init__(self, leader: Leader) -> None:
        super().__init__(None)
        self._leader, self._computed = leader, False

    def read(self) -> list[int]:
        while not self._computed:
            calls, step = self._leader.later.popleft()
            made = perform(self._leader.runner, calls)
            step.picked, step.slots, step.logits, step.tokens = made.picked, made.slots, made.logits, made.tokens
            step._computed = True
        return super().read()


def perform(runner: Runner, calls: Calls) -> Launched:
    """Do what was asked; gives what the last call, a launch, has made."""
    made = Launched(None)
    for name, arguments in calls:
        if name == "launch":
            made = runner.launch(*arguments)
        elif name.startswith("."):
            getattr(runner.sampler, name[1:])(*arguments)
        else:
            getattr(runner, name)(*arguments)
    return made


def follow(runner: Runner, leader: Connection) -> None:
    """Do what the first rank does, until it lets go."""
    while (calls := pickle.loads(leader.recv_bytes())) is not None:
        name, arguments = calls[-1]
        if name == "launch":
            rows, *rest = arguments
            calls[-1] = name, ([Row(*row) for row in rows], *rest)
        perform(runner, calls)
