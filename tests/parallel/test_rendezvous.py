"""The first step of a pipeline over NCCL, simulated: no two ranks wait for each other's first message. The executor itself says in
which order each rank calls; only what it would compute and send is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from torch import Tensor

from shardwise.measure.dry import dry_rank
from shardwise.parallel import pipeline, rendezvous
from shardwise.parallel.activations import handover
from shardwise.parallel.asynchronous import AsynchronousPipeline
from shardwise.parallel.observer import Observers
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.rendezvous import open_pairs
from shardwise.run.axes import ASYNCHRONOUS
from shardwise.schedules import SCHEDULES, Action, Schedule, legal, make_schedule, message_of

CPU = torch.device("cpu")
Call = tuple[str, frozenset[int]]
"""A message of this rank: the name of its group and the two ranks, for which NCCL makes one communicator."""


class OnGPU:
    """Stands for a tensor on a GPU: for these the executor receives ahead."""

    is_cuda, dtype, device = True, torch.float32, CPU

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> OnGPU:
        return cls()

    def contiguous(self) -> OnGPU:
        return self


class Calls:
    """A mesh of one pipeline whose groups are their names, and the calls of one of its ranks."""

    def __init__(self, ranks: int, me: int) -> None:
        self.ranks, self.me, self.made = list(range(ranks)), me, list[Call]()
        self.layout = SimpleNamespace(gathers_each_pass=False)

    def pipeline_ranks(self) -> list[int]:
        return self.ranks

    def index(self, axis: str) -> int:
        return self.me

    def size(self, axis: str) -> int:
        return len(self.ranks)

    def group(self, name: str) -> Any:
        return name

    def call(self, x: Tensor, peer: int, group: Any) -> Any:
        self.made.append((group, frozenset((self.me, peer))))
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While it is open, messages are noted and not sent."""
        with ExitStack() as stack:
            for module in (rendezvous, pipeline, handover):
                stack.enter_context(mock.patch.multiple(module, isend=self.call, irecv=self.call))
            yield


class OnlyMessages:
    """In place of a stage's passes: what they receive and send."""

    def _execute(self: Any, action: Action, last: bool) -> None:
        key = action.stage, action.microbatch
        if action.kind == "E" and action.stage in self.stages:
            self.handover.keeper(action)
            self.handover.evict(key, {}, (), ())
        elif action.kind in ("E", "L"):
            self._hand(action)
        else:
            needed, sent = self._needs(action), message_of(action, self.schedule.placement)
            if needed is not None:
                self._get(needed)
            if sent is not None:
                self.channel.send(OnGPU(), sent[0])


class Synchronous(OnlyMessages, Pipeline):
    pass


class Asynchronous(OnlyMessages, AsynchronousPipeline):
    pass


def calls_of_a_step(schedule: Schedule, me: int, opened: bool, forward_only: bool) -> list[Call]:
    """What a rank calls in its first step, and before it if its pairs are `opened`."""
    calls: Any = Calls(len(schedule.ranks), me)
    stages: Any = dict.fromkeys(schedule.stages_of(me), SimpleNamespace(split=None, model=None))
    kind = Asynchronous if schedule.name in ASYNCHRONOUS else Synchronous
    executor: Any = kind(stages, schedule, calls, 0, SimpleNamespace(update=lambda: None), Observers())
    if kind is Asynchronous:
        versions: Any = SimpleNamespace(using=nullcontext, advance=lambda oldest: None)
        executor.attach(versions, lambda: None, lambda: None)
    with calls.noted(), mock.patch.object(pipeline, "end_forward_passes"):
        if opened:
            open_pairs(calls, schedule, CPU)
        executor.run([{}] * schedule.microbatches, OnGPU(), None, None if forward_only else 1.0)
    return calls.made


def waiting(calls: Iterable[Iterable[Call]]) -> list[int]:
    """The ranks that wait for ever. NCCL makes a communicator at the first call for it, where a rank waits until the other one has
    come to it too; later calls do not wait."""
    left = [iter(each) for each in calls]
    here = [next(each, None) for each in left]
    made: set[Call] = set()
    moved = True
    while moved:
        moved = False
        for rank, call in enumerate(here):
            while call is not None and (call in made or all(here[peer] == call for peer in call[1])):
                made.add(call)
                call = here[rank] = next(left[rank], None)
                moved = True
    return [rank for rank, call in enumerate(here) if call is not None]


def hangs(schedule: Schedule, opened: bool, forward_only: bool = False) -> bool:
    return bool(waiting(calls_of_a_step(schedule, r, opened, forward_only) for r in range(len(schedule.ranks))))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_first_step_hangs_whose_pairs_are_open(name: str) -> None:
    for ranks, microbatches in ((2, 1), (2, 2), (2, 5), (4, 1), (4, 2), (4, 3), (4, 8), (5, 7), (8, 1), (8, 12)):
        if not legal(name, ranks, microbatches):
            schedule = make_schedule(name, ranks, microbatches)
            for forward_only in (False, True):
                assert not hangs(schedule, True, forward_only), (ranks, microbatches, forward_only)


@pytest.mark.parametrize(
    ("name", "microbatches", "forward_only"),
    [("dualpipe", 8, False), ("dualpipe", 8, True), ("1f1b", 1, False), ("bpipe", 1, False), ("zb-v", 1, True)],
)
def test_one_hangs_whose_pairs_are_not(name: str, microbatches: int, forward_only: bool) -> None:
    assert hangs(make_schedule(name, 4, microbatches), False, forward_only)


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_pairs_of_any_step_are_opened(name: str) -> None:
    """A step may have other microbatches than the one that the pairs were opened for."""
    for ranks in (2, 4, 8):
        opened = make_schedule(name, ranks, 1)
        many = make_schedule(name, ranks, 2 * ranks)
        for me in range(ranks):
            calls: Any = Calls(ranks, me)
            with calls.noted():
                open_pairs(calls, opened, CPU)
            assert set(calls_of_a_step(many, me, False, False)) <= set(calls.made), (ranks, me)


def test_a_pipeline_opens_its_pairs_before_its_first_step() -> None:
    run = cases.make_run("dense", dict(pipeline=2, schedule="dualpipe"), microbatch=1, layers=2)
    for rank in range(2):
        found = []

        def note(x: Tensor, peer: int, group: Any, found: list[Any] = found, rank: int = rank) -> Any:
            found.append((group.group_desc, frozenset((rank, peer))))
            return mock.Mock()

        with mock.patch.multiple(rendezvous, isend=note, irecv=note), dry_rank(run, rank):
            pass
        assert found == [("pipeline", {0, 1}), ("pipeline_back", {0, 1})]
