"""The ranks of one engine: the first schedules, and the runners of the others repeat every call to its runner.

A step is one message to each of the other ranks, with all calls since the last step: slot assignments, changed pages, swaps and
copies, and the rows to compute. The ranks then meet in the collectives of the forward pass. Tensor ranks sample the same tokens
from the same logits. The first rank holds the last pipeline stage, so the sampled tokens are known where the scheduler is.

A CPU computes synchronously: waiting for the earlier stages would keep the scheduler from the next step. So on CPUs the first rank
computes its stage of a step only when the step is read.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shardwise.serve.links import Sender
from shardwise.serve.request import Sampling
from shardwise.serve.runner import Launched, Row, Runner

Calls = list[tuple[str, tuple[Any, ...]]]
"""Methods of a runner, or of its sampler if they begin with a dot, and their arguments."""


class Leader:
    """Stands in for an engine's runner where several ranks have one each."""

    def __init__(self, runner: Runner, followers: Sequence[Connection], stages: int = 1) -> None:
        self.runner, self.stages = runner, stages
        self.model, self.longest, self.sequences, self.gpu = runner.model, runner.longest, runner.sequences, runner.gpu
        self.sampler = _ToldSampler(self)
        self.asked: Calls = []
        self.computes_later = stages > 1 and not self.gpu
        # Stages wait for each other, at last for this rank, which sends the next step before it computes one.
        self.senders = [Sender(each.send_bytes) for each in followers] if self.computes_later else []
        self.sends: list[Callable[[bytes], None]] = [each.send_bytes for each in followers]
        if self.computes_later:
            self.sends = [each.send for each in self.senders]
        self.later: deque[tuple[Calls, _Later]] = deque()

    def set_pages(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Same as the runner's; sent with the next step."""
        if changes:
            self.asked.append(("set_pages", (changes,)))

    def swap(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]], host_pages: int) -> None:
        """Same as the runner's; sent with the next step."""
        if out or back:
            self.asked.append(("swap", (out, back, host_pages)))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Same as the runner's; sent with the next step."""
        if pairs:
            self.asked.append(("copy_pages", (pairs,)))

    def launch(self, rows: list[Row], masks: np.ndarray | None = None, keep_logits: bool = False) -> Launched:
        """Same as the runner's, on all ranks."""
        calls = self._tell("launch", (rows, masks, keep_logits))
        if not self.computes_later:
            return perform(self.runner, calls)
        later = _Later(self)
        self.later.append((calls, later))
        return later

    def warm(self, step_tokens: int, host_pages: int = 0) -> None:
        """Same as the runner's, on all ranks."""
        perform(self.runner, self._tell("warm", (step_tokens, host_pages)))

    def close(self) -> None:
        """Tell the other ranks to end."""
        for send in self.sends:
            send(pickle.dumps(None))
        for sender in self.senders:
            sender.end()
            sender.join()

    def _tell(self, name: str, arguments: tuple[Any, ...]) -> Calls:
        calls, self.asked = [*self.asked, (name, arguments)], []
        message = pickle.dumps([*calls[:-1], (name, _packed(arguments) if name == "launch" else arguments)])
        for send in self.sends:
            send(message)
        return calls


def _packed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a launch, with rows as plain tuples, which cost a fraction to send."""
    rows, *rest = arguments
    return [(row.slot, row.start, row.tokens, row.count, row.samples, row.wanted) for row in rows], *rest


class _ToldSampler:
    """The sampler of a leader: slot assignments are sent with the next step."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def assign(self, slot: int, sampling: Sampling, seed: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Same as the sampler's."""
        self._leader.asked.append((".assign", (slot, sampling, seed, list(prompt), list(generated))))


class _Later(Launched):
    """A step that the other stages have begun; this rank computes it when it is read."""

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
    """Make the calls; returns the result of the last one if it is a launch."""
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
    """Repeat the calls of the first rank, until it says to end."""
    while (calls := pickle.loads(leader.recv_bytes())) is not None:
        name, arguments = calls[-1]
        if name == "launch":
            rows, *rest = arguments
            calls[-1] = name, ([Row(*row) for row in rows], *rest)
        perform(runner, calls)
