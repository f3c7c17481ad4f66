"""The pipeline as it was executed: the actions of each rank in their order, whether that is a known schedule, and the bubble.

A rank's time, from its first action to the end of its last, is split at the beginnings of its actions; what it spends in one of
the pieces without waiting for a message is the work of that action. All else in the window that the pipeline's ranks share is
bubble. The lists are then played once more with exactly these works, and with the delays that messages were seen to have: if the
profile was read rightly, that gives the same bubble. Played with messages that arrive at once, it is the schedule's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardwise.labels import read_label
from shardwise.schedules import KINDS, SCHEDULES, Action, Stuck, legal, make_schedule, play
from shardwise.trace.answers import PipelineRank, PipelineStep
from shardwise.trace.reading.events import Profile
from shardwise.trace.sending.axes import POINT_TO_POINT, axis_of
from shardwise.trace.sending.sent import Sent, label_spans
from shardwise.trace.spans.activity import Activity
from shardwise.trace.spans.classes import COMMUNICATION
from shardwise.trace.spans.intervals import Intervals, difference, intersect, total, union, window


@dataclass(frozen=True)
class Executed:
    """One rank's actions in one step: beginnings, the end of the last, and when it waited for messages; reference clock."""

    actions: tuple[Action, ...]
    begin: tuple[int, ...]
    end: int
    waits: Intervals

    @property
    def first(self) -> tuple[int, int]:
        """Beginning and end of the first action."""
        return self.begin[0], self.begin[1] if len(self.begin) > 1 else self.end

    def works(self) -> list[int]:
        """What each action took without waiting."""
        edges = [*self.begin, self.end]
        return [
            after - before - total(intersect(self.waits, window(before, after))) for before, after in pairwise(edges)
        ]


def read_action(text: str) -> Action | None:
    """The action of a label's word, "F2.5"; None for what is none."""
    stage, dot, microbatch = text[1:].partition(".")
    if text[:1] in KINDS and dot and stage.isdigit() and microbatch.isdigit():
        return Action(text[0], int(stage), int(microbatch))  # type: ignore[arg-type]
    return None


def executed(activity: Activity, sent: Sent, shift: int, start: int, end: int) -> Executed | None:
    """What a rank did in a window; `shift` takes the profile's clock to the reference. None without labels of actions."""
    profile = activity.profile
    events = profile.events
    found: list[tuple[int, int, int, Action]] = []
    for event in label_spans(profile, "action").event.tolist():
        label = read_label(events.names[events.name[event]])
        action = read_action(label.words[0]) if label else None
        if action is not None and events.start[event] < end and events.end[event] > start:
            found.append((int(events.start[event]), int(events.end[event]), event, action))
    if not found:
        return None
    found.sort()
    if activity.on_host:
        begin, last = [one[0] for one in found], max(one[1] for one in found)
    else:
        begin, last = _on_device(activity, found)
    waits = _waits(activity, sent, int(events.lane[found[0][2]]))
    inside = intersect(waits, window(begin[0], last))
    moved = union(inside[0] + shift, inside[1] + shift)
    return Executed(tuple(one[3] for one in found), tuple(b + shift for b in begin), last + shift, moved)


def _on_device(activity: Activity, found: Sequence[tuple[int, int, int, Action]]) -> tuple[list[int], int]:
    """When the device began what each action launched, and ended the last of it. An action that launched nothing begins with
    the one after it."""
    events = activity.profile.events
    first = np.array([one[0] for one in found])
    finish = np.array([one[1] for one in found])
    known = np.flatnonzero(activity.launch >= 0)
    call = events.start[activity.launch[known]]
    at = np.searchsorted(first, call, side="right") - 1
    inside = (at >= 0) & (call < finish[np.maximum(at, 0)])
    rows, at = known[inside], at[inside]
    begin = np.full(len(found), np.iinfo(np.int64).max)
    np.minimum.at(begin, at, activity.start[rows])
    if not len(rows):
        return first.tolist(), int(finish.max())
    end = int(activity.end[rows].max())
    begin = np.minimum.accumulate(np.minimum(begin, end)[::-1])[::-1]
    return begin.tolist(), end


def _waits(activity: Activity, sent: Sent, lane: int) -> Intervals:
    """When a rank had nothing to do but wait for a message of the pipeline: a receive was under way, and its device did nothing
    else, or the host's thread that runs the actions."""
    waiting = sent.those(
        lambda d: d.collective in POINT_TO_POINT and d.collective != "send" and d.axis in ("pipeline", "unknown")
    )
    receives = union(sent.start[waiting], sent.end[waiting])
    if activity.on_host:
        asked = np.zeros(len(activity.profile.events), np.bool_)
        asked[sent.carrier[sent.carrier >= 0]] = True
        busy = (activity.lane == lane) & ~asked[activity.event]
        return difference(receives, union(activity.start[busy], activity.end[busy]))
    busy = activity.kind != COMMUNICATION
    others = ~sent.those(lambda d: d.collective in POINT_TO_POINT)
    computing = union(
        np.concatenate((activity.start[busy], sent.start[others])),
        np.concatenate((activity.end[busy], sent.end[others])),
    )
    return difference(receives, computing)


def pipelines(profiles: Mapping[int, Profile], steps: Mapping[int, Mapping[int, Executed]]) -> tuple[PipelineStep, ...]:
    """Every pipeline in every step; `steps` has what each rank executed, by step and rank."""
    found = []
    for step, ranks in sorted(steps.items()):
        for members in _members(profiles, ranks):
            seen = {rank: ranks[rank] for rank in members if rank in ranks}
            found.append(_one(step, members, seen))
    return tuple(found)


def _members(profiles: Mapping[int, Profile], ranks: Mapping[int, Executed]) -> Iterator[tuple[int, ...]]:
    """The pipelines that these ranks belong to: their groups of that axis, or each for itself where none is named."""
    done: set[int] = set()
    for rank in sorted(ranks):
        if rank in done:
            continue
        groups = profiles[rank].groups
        of_axis = {
            g.ranks for name, g in groups.items() if axis_of(g.description, name) == "pipeline" and rank in g.ranks
        }
        members = max(of_axis, key=len) if of_axis else (rank,)
        done |= set(members)
        yield members


def _one(step: int, members: tuple[int, ...], seen: Mapping[int, Executed]) -> PipelineStep:
    # A rank that waits for its first message has not begun.
    start = min(one.begin[0] + total(intersect(one.waits, window(*one.first))) for one in seen.values())
    end = max(one.end for one in seen.values())
    works = {rank: one.works() for rank, one in seen.items()}
    lists = {rank: one.actions for rank, one in seen.items()}
    whole = len(seen) == len(members)
    played = makespan(lists, works, _latencies(seen)) if whole else None
    instant = makespan(lists, works, {}) if whole else None
    name, chunks, microbatches = _schedule(members, lists)
    ranks = {}
    for rank, one in seen.items():
        work = sum(works[rank])
        ranks[rank] = PipelineRank(
            tuple(map(str, one.actions)), one.begin[0], one.end, work, end - start - work,
            played - work if played is not None else 0, instant - work if instant is not None else 0,
        )  # fmt: skip
    return PipelineStep(step, members, end - start, ranks, name, chunks, microbatches)


def _input(action: Action, last: int) -> tuple[str, int, int] | None:
    """What an action needs from another stage, as `_output` names it."""
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        return "F", stage - 1, microbatch
    return ("B", stage + 1, microbatch) if kind in ("B", "I") and stage < last else None


def _output(action: Action) -> tuple[str, int, int]:
    """What an action makes; both kinds of backward pass for the input make the gradient that travels on."""
    return ("B" if action.kind == "I" else action.kind), action.stage, action.microbatch


def _latencies(seen: Mapping[int, Executed]) -> dict[tuple[str, int, int], int]:
    """Of each message: from the end of the action that made it to when the action that needs it could have begun, had it waited
    first and worked then. Less than nothing where it was sent before its action was over."""
    ended: dict[tuple[str, int, int], int] = {}
    for one in seen.values():
        for action, end in zip(one.actions, (*one.begin[1:], one.end), strict=True):
            ended[_output(action)] = end
    last = max((action.stage for one in seen.values() for action in one.actions), default=0)
    found: dict[tuple[str, int, int], int] = {}
    for one in seen.values():
        for action, begin, end in zip(one.actions, one.begin, (*one.begin[1:], one.end), strict=True):
            needs = _input(action, last)
            if needs is not None and needs in ended:
                waited = total(intersect(one.waits, window(begin, end)))
                found[needs] = begin + waited - ended[needs] if waited else min(0, begin - ended[needs])
    return found


def makespan(
    lists: Mapping[int, Sequence[Action]],
    works: Mapping[int, Sequence[int]],
    latency: Mapping[tuple[str, int, int], int],
) -> int | None:
    """From the first start to the last end when every action begins as soon as its rank is free and its input is there, with a
    duration of its own for each; None when the lists wait for each other. In whole nanoseconds."""
    actions = [action for own in lists.values() for action in own]
    stages = 1 + max((action.stage for action in actions), default=0)
    microbatches = 1 + max((action.microbatch for action in actions), default=0)
    delays = [0] * (2 * (stages + 1) * microbatches)
    for (kind, stage, microbatch), delay in latency.items():
        delays[(stage + 1 if kind == "F" else stages + 1 + stage) * microbatches + microbatch] = delay
    try:
        _, ends = play(list(lists.values()), [works[rank] for rank in lists], stages, microbatches, delays)
    except Stuck:
        return None
    return int(max((end[-1] for end in ends if end), default=0))


def _schedule(members: tuple[int, ...], lists: Mapping[int, Sequence[Action]]) -> tuple[str, int, int]:
    """The name of the schedule that these lists are, stages a rank, and microbatches; "" where it is none."""
    actions = [action for rank in lists for action in lists[rank]]
    microbatches = len({action.microbatch for action in actions})
    stages = len({action.stage for action in actions})
    chunks = max(1, stages // len(lists))
    if len(lists) < len(members):
        return "", chunks, microbatches
    wanted = tuple(tuple(lists[rank]) for rank in members)
    for name in SCHEDULES:
        if not legal(name, len(members), microbatches, chunks):
            try:
                if make_schedule(name, len(members), microbatches, chunks).ranks == wanted:
                    return name, chunks, microbatches
            except ValueError:
                continue
    return "", chunks, microbatches
