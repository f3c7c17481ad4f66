"""A dry step of fewer microbatches that tells all about the whole one.

Microbatches in the middle of a step are alike: the first gathers parameters, the last reduces gradients, and those between do the
same again and again. So a few are run, and what a middle one does is counted once more for each that is left out. With ZeRO-3 in a
pipeline what a pass gathers depends on its place in a round, so there a whole round is the unit. As many are run as bring memory to
its peak. Schedules that hold every microbatch have no middle, and neither has a short step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardwise.measure.counts.traffic import TrafficCounter
from shardwise.measure.counts.work import WorkCounter
from shardwise.parallel.observer import Observer
from shardwise.plan.trainer.state import activations
from shardwise.run import Run
from shardwise.run.sections.objective import facts_of
from shardwise.schedules import Action, fewer_rounds

FEWEST = 4
"""The first, the last, and two between them."""
MOST_ROUNDS = 4

Counts = dict[tuple[str, ...], float]


def with_microbatches(run: Run, count: int) -> Run:
    """The run with so many microbatches a step."""
    batch = count * run.train.microbatch * run.layout.data_ranks
    return replace(run, train=replace(run.train, global_batch=batch))


def microbatches_to_run(run: Run, rank: int) -> tuple[int, Sequence[int]]:
    """How many microbatches of a step to run on a rank, and which of them are those that all others repeat."""
    lay, whole = run.layout, run.accumulation
    if facts_of(run.objective).reference:  # whose passes come before all others
        return whole, range(0)
    unit = lay.pipeline if lay.zero == 3 else 1
    # In the first the last round moves every round before it; in the second not every microbatch is handed over.
    uneven = (lay.schedule == "interleaved" and whole % lay.pipeline) or lay.schedule == "bpipe"
    # From both ends, a microbatch that gathers as those between do is there from four rounds on: the one in the middle each way.
    least = MOST_ROUNDS if lay.directions > 1 and lay.zero == 3 else 1
    peak = activations(run, rank)
    for rounds in range(least, 1 if uneven else 1 + MOST_ROUNDS):
        count = fewer_rounds(lay.pipeline, whole, rounds)
        if whole > count >= max(FEWEST, 3 * unit) and activations(with_microbatches(run, count), rank) == peak:
            if lay.directions > 1:  # one each way
                return count, [count // 4, count // 2 + count // 4]
            first = unit if unit > 1 else count // 2
            return count, range(first, first + unit)
    return whole, range(0)


class Repeated(Observer):
    """Tells what is done, and counts what the microbatches of `middle` do."""

    def __init__(
        self,
        middle: Sequence[int],
        work: WorkCounter,
        traffic: TrafficCounter,
        say: Callable[[str], None],
        actions: int,
    ) -> None:
        self.middle, self.work, self.traffic = middle, work, traffic
        self.say, self.actions, self.done = say, actions, 0
        self.counts: Counts = {}

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Count what this adds."""
        self.done += 1
        self.say(f"counting FLOPs, traffic and memory: action {self.done} of {self.actions}")
        if action.microbatch not in self.middle:
            yield
            return
        before = self._now()
        yield
        for key, value in self._now().items():
            if value != before.get(key, 0):
                self.counts[key] = self.counts.get(key, 0) + value - before.get(key, 0)

    def _now(self) -> Counts:
        work, wire = self.work, self.traffic
        found: Counts = {}
        for name, table in (("flops", work.flops), ("bytes", work.bytes)):
            found |= {(name, part, each): value for part, kinds in table.items() for each, value in kinds.items()}
        for name, counter in (("traffic", wire.traffic), ("messages", wire.messages)):
            found |= {(name, *key): value for key, value in counter.items()}
        return found

    def add(self, times: int) -> None:
        """Add the middle so many times more to what was counted."""
        work, wire = self.work, self.traffic
        tables = {"flops": work.flops, "bytes": work.bytes}
        counters = {"traffic": wire.traffic, "messages": wire.messages}
        for (name, *key), value in self.counts.items():
            if name in tables:
                part, each = key
                tables[name][part][each] += times * value
            else:
                axis, operation = key
                counters[name][axis, operation] += times * value  # type: ignore[assignment]
