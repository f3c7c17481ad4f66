"""The executed pipeline: the actions of each rank in order, the name of that schedule, and the bubble.

A rank's time, from the start of its first action to the end of its last, is split at the starts of its actions. Time in an action
not spent waiting for a P2P message is the work of that action; the rest of the pipeline's window is bubble. The action lists are
then simulated with the measured work and message latencies: if the profile was read correctly, the bubble is the same. Simulated
with zero latency, they give the bubble of the schedule alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from shardwise.schedules import KINDS, PASSES, SCHEDULES, Action, Deadlock, legal, make_schedule, play
from shardwise.trace.answers import PipelineRank, PipelineStep
from shardwise.trace.comms.describe import POINT_TO_POINT, UNKNOWN, axis_of
from shardwise.trace.comms.events import CollectiveEvents
from shardwise.trace.rank import Rank
from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import Profile
from shardwise.trace.spans.activity import COMPUTE, COPY, Activity, label_spans
from shardwise.trace.spans.intervals import Intervals, clip, covered, difference, join, union


@dataclass(frozen=True)
class Executed:
    """One rank's actions in one step, on the reference clock."""

    actions: tuple[Action, ...]
    edges: tuple[int, ...]
    """Start of each action, and the end of the last."""
    waits: Intervals
    """When the rank waited for P2P messages."""

    @cached_property
    def waited(self) -> list[int]:
        """Wait time in each action."""
        return np.diff(covered(self.waits, np.array(self.edges, np.int64))).tolist()

    @cached_property
    def works(self) -> list[int]:
        """Time of each action without waiting."""
        return [end - start - wait for (start, end), wait in zip(pairwise(self.edges), self.waited, strict=True)]


def read_action(text: str) -> Action | None:
    """The action that a label names, as in "F2.5"; None for any other text."""
    stage, dot, microbatch = text[1:].partition(".")
    if text[:1] in KINDS and dot and stage.isdigit() and microbatch.isdigit():
        return Action(text[0], int(stage), int(microbatch))  # type: ignore[arg-type]
    return None


class Actions:
    """The labelled actions of one rank. What all its steps need is computed once."""

    def __init__(self, rank: Rank, shift: int) -> None:
        """`shift` converts the rank's times to the reference clock."""
        self._rank, self._shift = rank, shift
        events = rank.profile.events
        event = label_spans(events, "action").event
        action = {
            name: one for name, label in events.labels.items() if (one := read_action(label.words[0])) is not None
        }
        event = event[[name in action for name in events.name[event].tolist()]]
        event = event[np.lexsort((event, events.end[event], events.start[event]))]
        self._action = [action[name] for name in events.name[event].tolist()]
        self._start, self._end = events.start[event], events.end[event]
        self._reach = np.maximum.accumulate(self._end)
        self._track = events.track[event]
        self._waits: dict[int, Intervals] = {}

    def __len__(self) -> int:
        return len(self._action)

    def executed(self, start: int, end: int) -> Executed | None:
        """The actions in a window; None if there are none."""
        high = int(np.searchsorted(self._start, end, side="left"))
        low = min(int(np.searchsorted(self._reach, start, side="right")), high)
        rows = low + np.flatnonzero(self._end[low:high] > start)
        if not len(rows):
            return None
        if self._rank.activity.on_host:
            begin, last = self._start[rows].tolist(), int(self._end[rows].max())
        else:
            begin, last = self._on_device(self._start[rows], self._end[rows])
        inside = clip(self._waits_of(int(self._track[rows[0]])), begin[0], last)
        edges = tuple(time + self._shift for time in (*begin, last))
        waits = Intervals(inside.start + self._shift, inside.end + self._shift)
        return Executed(tuple(self._action[row] for row in rows.tolist()), edges, waits)

    def _waits_of(self, track: int) -> Intervals:
        """When the rank waited; without a device, when this thread did."""
        track = track if self._rank.activity.on_host else -1
        if track not in self._waits:
            self._waits[track] = _waits(self._rank.activity, self._rank.comms, track)
        return self._waits[track]

    @cached_property
    def _launches(self) -> tuple[Integers, Integers]:
        """Rows of the activity with a launch, and the start of that call, by its start."""
        activity = self._rank.activity
        known = np.flatnonzero(activity.launch >= 0)
        call = activity.profile.events.start[activity.launch[known]]
        order = np.argsort(call, kind="stable")
        return known[order], call[order]

    def _on_device(self, first: Integers, finish: Integers) -> tuple[list[int], int]:
        """Start of the first kernel of each action, and end of the last kernel of all. An action without kernels begins with the
        next one."""
        activity = self._rank.activity
        rows, call = self._launches
        some = slice(*np.searchsorted(call, (first[0], int(finish.max()))).tolist())
        rows, call = rows[some], call[some]
        at = np.searchsorted(first, call, side="right") - 1
        inside = (at >= 0) & (call < finish[np.maximum(at, 0)])
        rows, at = rows[inside], at[inside]
        begin = np.full(len(first), np.iinfo(np.int64).max)
        np.minimum.at(begin, at, activity.start[rows])
        if not len(rows):
            return first.tolist(), int(finish.max())
        end = int(activity.end[rows].max())
        begin = np.minimum.accumulate(np.minimum(begin, end)[::-1])[::-1]
        return begin.tolist(), end


def _waits(activity: Activity, comms: CollectiveEvents, track: int) -> Intervals:
    """When a rank only waited for a P2P message of the pipeline: a receive was in flight, and its device, or the thread that runs
    the actions, did nothing else."""
    waiting = comms.mask(lambda d: d.collective in ("recv", "send_recv") and d.axis in ("pipeline", UNKNOWN))
    receives = union(comms.start[waiting], comms.end[waiting])
    if activity.on_host:
        execution = np.zeros(len(activity.profile.events), np.bool_)
        execution[comms.execution[comms.execution >= 0]] = True
        busy = (activity.track == track) & ~execution[activity.event]
        return difference(receives, union(activity.start[busy], activity.end[busy]))
    others = ~comms.mask(lambda d: d.collective in POINT_TO_POINT)
    computing = join(activity.intervals(COMPUTE, COPY), union(comms.start[others], comms.end[others]))
    return difference(receives, computing)


def pipelines(ranks: Mapping[int, Rank], shifts: Mapping[int, int]) -> tuple[PipelineStep, ...]:
    """Every pipeline in every step; `shifts` convert each rank's times to the reference clock."""
    steps: dict[int, dict[int, Executed]] = defaultdict(dict)
    for rank, r in ranks.items():
        actions = Actions(r, shifts[rank])
        for number, start, end in r.steps if actions else ():
            one = actions.executed(start, end)
            if one is not None:
                steps[number][rank] = one
    members_of = {rank: _members(ranks[rank].profile) for rank in {rank for of in steps.values() for rank in of}}
    return tuple(
        _pipeline_step(step, members, {rank: of_rank[rank] for rank in members if rank in of_rank})
        for step, of_rank in sorted(steps.items())
        for members in _groups(members_of, of_rank)
    )


def _members(profile: Profile) -> tuple[int, ...]:
    """The pipeline group of a rank; a rank without such a process group is one by itself."""
    of_axis = {g.ranks for name, g in profile.groups.items() if axis_of(g.description, name) == "pipeline"}
    return max((ranks for ranks in of_axis if profile.rank in ranks), key=len, default=(profile.rank,))


def _groups(members_of: Mapping[int, tuple[int, ...]], ranks: Mapping[int, Executed]) -> Iterator[tuple[int, ...]]:
    """The pipeline groups of these ranks."""
    done: set[int] = set()
    for rank in sorted(ranks):
        if rank not in done:
            done |= set(members_of[rank])
            yield members_of[rank]


def _pipeline_step(step: int, members: tuple[int, ...], profiled: Mapping[int, Executed]) -> PipelineStep:
    # A rank has not begun while it waits for its first message.
    start = min(one.edges[0] + one.waited[0] for one in profiled.values())
    end = max(one.edges[-1] for one in profiled.values())
    lists = {rank: one.actions for rank, one in profiled.items()}
    scheduled = instant = None
    if len(profiled) == len(members):
        parts = list(profiled.values())
        scheduled, instant = played(parts, _latencies(parts)), played(parts, {})
    name, chunks, microbatches = _schedule(members, lists)
    ranks = {}
    for rank, one in profiled.items():
        work = sum(one.works)
        ranks[rank] = PipelineRank(
            tuple(map(str, one.actions)), one.edges[0], one.edges[-1], work, end - start - work,
            scheduled - work if scheduled is not None else 0, instant - work if instant is not None else 0,
            tuple((begin + waited - start, finish - start)
                  for (begin, finish), waited in zip(pairwise(one.edges), one.waited, strict=True)),
        )  # fmt: skip
    return PipelineStep(step, members, end - start, ranks, name, chunks, microbatches)


def _latencies(ranks: Sequence[Executed]) -> dict[Action, int]:
    """Latency of each P2P message, keyed by the forward or backward that produced it: from the end of that action to when the
    consuming action could have started, had it done all its waiting first. Negative if it was sent before its action ended."""
    ended = {_producer(action): end for one in ranks for action, end in zip(one.actions, one.edges[1:], strict=True)}
    found: dict[Action, int] = {}
    for one in ranks:
        for (kind, stage, microbatch), begin, waited in zip(one.actions, one.edges, one.waited, strict=False):
            if kind not in PASSES:
                continue
            needs = Action("F", stage - 1, microbatch) if kind == "F" else Action("B", stage + 1, microbatch)
            if needs in ended:
                found[needs] = begin + waited - ended[needs] if waited else min(0, begin - ended[needs])
    return found


def _producer(action: Action) -> Action:
    """The action as producer of a message: `B` and `I` both produce the input gradient that is sent on."""
    return action._replace(kind="B") if action.kind == "I" else action


def played(ranks: Sequence[Executed], latency: Mapping[Action, int]) -> int | None:
    """Makespan if every action starts as soon as its rank is free and its input has arrived. None if the lists deadlock. Exact:
    floats hold integers of up to 2^53, and a step has fewer nanoseconds."""
    actions = [action for one in ranks for action in one.actions]
    stages = 1 + max(action.stage for action in actions)
    microbatches = 1 + max(action.microbatch for action in actions)
    forward, backward = (
        [float(latency.get(Action(kind, s, m), 0)) for s in range(stages) for m in range(microbatches)]
        for kind in ("F", "B")
    )
    works = [list(map(float, one.works)) for one in ranks]
    # Where some do not go through the first stage, they enter at the other end.
    directions = 1 if len({a.microbatch for a in actions if a.stage == 0}) == microbatches else 2
    try:
        return int(
            play(
                [one.actions for one in ranks], stages, microbatches, works, forward, backward, 0.0, directions
            ).makespan
        )
    except Deadlock:
        return None


def _schedule(members: tuple[int, ...], lists: Mapping[int, Sequence[Action]]) -> tuple[str, int, int]:
    """The name of the schedule with these lists, "" if unknown; stages per rank; microbatches."""
    actions = [action for rank in lists for action in lists[rank]]
    microbatches = len({action.microbatch for action in actions})
    stages = len({action.stage for action in actions})
    chunks = max(1, stages // len(lists))
    if len(lists) < len(members):
        return "", chunks, microbatches
    wanted = tuple(tuple(lists[rank]) for rank in members)
    return _name_of(wanted, microbatches, chunks), chunks, microbatches


@lru_cache(maxsize=64)
def _name_of(lists: tuple[tuple[Action, ...], ...], microbatches: int, chunks: int) -> str:
    """The name of the schedule with these lists, "" if unknown. All steps of a run have the same lists."""
    for name in SCHEDULES:
        if not legal(name, len(lists), microbatches, chunks):
            try:
                if make_schedule(name, len(lists), microbatches, chunks).ranks == lists:
                    return name
            except ValueError:
                continue
    return ""
