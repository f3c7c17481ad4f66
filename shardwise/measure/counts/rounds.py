"""A dry step with fewer microbatches, from which the counts of the full step follow.

Microbatches in the middle of a step are identical: the first gathers parameters, the last reduces gradients, and those between
repeat the same work. So only a few are run, and the counts of a middle one are added for each that is left out. With ZeRO-3 in a
pipeline, the parameters that a pass gathers depend on its position in a round, so the unit is a full round. Enough microbatches are
run to reach peak memory. Schedules that hold every microbatch have no middle, and neither has a short step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardwise.measure.counts.traffic import TrafficCounter
from shardwise.measure.counts.work import WorkCounter
from shardwise.parallel.observer import Observer
from shardwise.plan.trainer.rank import planned_rank
from shardwise.plan.trainer.state import activations
from shardwise.run import Run
from shardwise.run.sections.objective import facts_of
from shardwise.schedules import Action, fewer_rounds

FEWEST = 4
"""The first, the last, and two middle ones."""
MOST_ROUNDS = 4

Counts = dict[tuple[str, ...], float]


def with_microbatches(run: Run, count: int) -> Run:
    """The run with `count` microbatches a step."""
    batch = count * run.train.microbatch * run.layout.data_ranks
    return replace(run, train=replace(run.train, global_batch=batch))


def microbatches_to_run(run: Run, rank: int) -> tuple[int, Sequence[int]]:
    """Returns how many microbatches of a step to run on a rank, and which of them stand for the ones left out."""
    lay, whole = run.layout, run.accumulation
    if facts_of(run.objective).reference:  # the reference model's passes come before all others
        return whole, range(0)
    unit = lay.pipeline if lay.zero == 3 else 1
    # Interleaved: a shorter last round shifts every round before it. BPipe: not every microbatch is handed over.
    uneven = (lay.schedule == "interleaved" and whole % lay.pipeline) or lay.schedule == "bpipe"
    # With two directions, a microbatch that gathers like the middle ones exists from four rounds on: one each way.
    least = MOST_ROUNDS if lay.directions > 1 and lay.zero == 3 else 1
    peak = activations(planned_rank(run, rank))
    for rounds in range(least, 1 if uneven else 1 + MOST_ROUNDS):
        count = fewer_rounds(lay.pipeline, whole, rounds)
        short = planned_rank(with_microbatches(run, count), rank)
        if whole > count >= max(FEWEST, 3 * unit) and activations(short) == peak:
            if lay.directions > 1:  # one in each direction
                return count, [count // 4, count // 2 + count // 4]
            first = unit if unit > 1 else count // 2
            return count, range(first, first + unit)
    return whole, range(0)


def microbatches_at_peak(run: Run, rank: int) -> int:
    """The number of microbatches of a step to run on a rank for its memory to peak as in the whole step. A rank with several stages
    that keeps gradients whole until the end has those of all stages beside the most activations from the second round on."""
    count, lay = microbatches_to_run(run, rank)[0], run.layout
    rounds = 2 if lay.zero == 1 and lay.stages_per_rank > 1 else 1
    return max(count, min(run.accumulation, rounds * lay.pipeline))


class Repeated(Observer):
    """Reports progress, and records the counts of the microbatches in `middle`."""

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
        """Record the counts that this action adds."""
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
        """Add the counts of the middle microbatches `times` more times."""
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
