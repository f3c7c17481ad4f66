"""Checks a schedule that a test made: nothing missing, nothing twice, nothing before its input, and no
two ranks that wait for each other.

The lists are played as the trainer plays them, with receives that block and sends that do not. Everything found is
reported, as sentences, with the memory high-water mark of each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import sub

from shardwise.schedules import Timing
from shardwise.schedules.actions import KINDS, Action, Kind, Schedule, saved_activations

HANDED: tuple[Kind, ...] = ("E", "L")
WAITS = {"U": "B", "E": "F", "L": "E", "A": "E", "R": "A", "a": "A", "r": "R"}
"""What each part of a transfer between partners comes after."""


@dataclass(frozen=True)
class Report:
    """What is wrong with a schedule, and what it holds, in microbatch-stages. Empty counts when it has invalid actions."""

    problems: tuple[str, ...]
    in_flight: tuple[tuple[int, ...], ...]
    """For each rank, how many it holds after each action, from F until B or W."""
    high_water: tuple[int, ...]
    """The most of these."""
    high_water_input: tuple[int, ...]
    """The most when a split backward frees everything after I."""

    @property
    def ok(self) -> bool:
        """Whether the schedule can be executed."""
        return not self.problems


def check(schedule: Schedule, most: int = 50) -> Report:
    """Checks everything; at most `most` problems are spelt out, and the rest counted."""
    problems = list(_shape(schedule))
    if problems:
        # Without sound numbers an action has no rank and no memory to speak of.
        return Report(_bounded(problems, most), (), (), ())
    listed: dict[Action, tuple[int, int]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for at, action in enumerate(actions):
            listed.setdefault(action, (rank, at))
    problems += _counts(schedule)
    problems += _order(schedule, listed)
    problems += _deadlock(schedule, listed)
    in_flight = _whole(saved_activations(schedule))
    until_input = _whole(saved_activations(schedule, after_input=[0] * schedule.stages))
    return Report(
        _bounded(problems, most),
        in_flight,
        tuple(max(levels, default=0) for levels in in_flight),
        tuple(max(levels, default=0) for levels in until_input),
    )


def _shape(schedule: Schedule) -> Iterator[str]:
    """Numbers that name no rank, stage, microbatch or kind."""
    for stage, home in enumerate(schedule.placement):
        if not 0 <= home < len(schedule.ranks):
            yield f"stage {stage} stands on rank {home}, but there are {len(schedule.ranks)} ranks"
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind not in KINDS:
                yield f"rank {rank} lists {action}: {action.kind} is not one of {', '.join(KINDS)}"
            if not 0 <= action.stage < schedule.stages:
                yield f"rank {rank} lists {action}, but there are {schedule.stages} stages"
            elif not 0 <= action.microbatch < schedule.microbatches:
                yield f"rank {rank} lists {action}, but there are {schedule.microbatches} microbatches"
            elif action.microbatch not in schedule.microbatches_of(action.stage):
                yield f"rank {rank} lists {action}, which goes the other way"


def _counts(schedule: Schedule) -> Iterator[str]:
    """Actions on another rank than their stage, and actions missing or listed more than once."""
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            home = schedule.placement[action.stage]
            partner = schedule.partners and action.kind in HANDED and rank == len(schedule.ranks) - 1 - home
            if home != rank and not partner:
                yield f"rank {rank} lists {action}, but stage {action.stage} stands on rank {schedule.placement[action.stage]}"
    times = Counter(action for actions in schedule.ranks for action in actions)
    updates = Counter(action.stage for actions in schedule.ranks for action in actions if action.kind == "U")
    for stage in range(schedule.stages) if updates else ():
        if updates[stage] != 1:
            yield f"stage {stage} is updated {_often(updates[stage])}"
    for stage in range(schedule.stages):
        for microbatch in schedule.microbatches_of(stage):
            forward, whole, grad_input, grad_weight = (times[Action(kind, stage, microbatch)] for kind in "FBIW")
            evicted, loaded = (times[Action(kind, stage, microbatch)] for kind in HANDED)
            if (evicted, loaded) not in ((0, 0), (2, 2)):
                yield (
                    f"microbatch {microbatch} of stage {stage} is evicted {_often(evicted)} and loaded {_often(loaded)}: both "
                    f"stand in the lists of two ranks, or in none"
                )
            if forward != 1:
                yield f"F{stage}.{microbatch} is listed {_often(forward)}"
            if (whole, grad_input, grad_weight) not in ((1, 0, 0), (0, 1, 1)):
                yield (
                    f"microbatch {microbatch} of stage {stage} goes back with B {_often(whole)}, I {_often(grad_input)} and "
                    f"W {_often(grad_weight)}: it needs either one B or one I and one W"
                )


def _order(schedule: Schedule, listed: dict[Action, tuple[int, int]]) -> Iterator[str]:
    """Actions listed before another on the same rank that they depend on."""
    for rank, actions in enumerate(schedule.ranks):
        for at, action in enumerate(actions):
            for needed in _needs(action, schedule):
                where = listed.get(needed)
                if where is not None and where[0] == rank and where[1] > at:
                    yield f"rank {rank} lists {action} before {needed}, which it needs"


def _deadlock(schedule: Schedule, listed: dict[Action, tuple[int, int]]) -> Iterator[str]:
    """Plays the lists with blocking receives until all are done or all wait.

    Only what comes from another rank can block. What is in no list is reported as missing, and what is listed too late on
    the same rank as out of order; neither is waited for, so that a deadlock is told from these.
    """
    if schedule.partners:
        schedule = _spelt_out(schedule)
        listed = {action: (rank, n) for rank, own in enumerate(schedule.ranks) for n, action in enumerate(own)}
    done: set[Action] = set()
    at = [0] * len(schedule.ranks)
    waiting: dict[Action, list[int]] = {}
    blocked: dict[int, Action] = {}
    ready = list(range(len(schedule.ranks)))
    while ready:
        rank = ready.pop()
        blocked.pop(rank, None)
        for action in schedule.ranks[rank][at[rank] :]:
            absent = (
                needed
                for needed in _needs(action, schedule)
                if needed not in done and needed in listed and listed[needed][0] != rank
            )
            missing = next(absent, None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                blocked[rank] = missing
                break
            done.add(action)
            at[rank] += 1
            ready += waiting.pop(action, [])
    if blocked:
        waits = (
            f"rank {rank} waits before {schedule.ranks[rank][at[rank]]} for {blocked[rank]} of rank {listed[blocked[rank]][0]}"
            for rank in sorted(blocked)
        )
        yield f"deadlock: {'; '.join(waits)}"


def _spelt_out(schedule: Schedule) -> Schedule:
    """The lists with what ranks do for their partners apart: A accepts what is evicted, R returns it; before the next forward the
    evicting rank waits for A (as "a"), before the backward for R (as "r")."""
    lists = []
    for rank, actions in enumerate(schedule.ranks):
        out: list[Action] = []
        gone: list[Action] = []
        for action in actions:
            own = schedule.placement[action.stage] == rank
            if action.kind in HANDED and not own:
                out.append(action._replace(kind="A" if action.kind == "E" else "R"))  # type: ignore[arg-type]
                continue
            if action.kind == "F":
                out += [one._replace(kind="a") for one in gone]  # type: ignore[arg-type]
                gone = []
            elif action.kind == "E":
                gone.append(action)
            elif action.kind == "B" and action._replace(kind="E") in actions:
                out.append(action._replace(kind="r"))  # type: ignore[arg-type]
            out.append(action)
        lists.append(tuple(out))
    return replace(schedule, ranks=tuple(lists))


def _needs(action: Action, schedule: Schedule) -> Iterator[Action]:
    """What an action reads; of a backward in one piece or split, whichever is listed."""
    kind, stage, microbatch = action
    if kind == "F":
        if not schedule.is_first(stage):
            yield Action("F", stage - 1, microbatch)
    elif kind == "W":
        yield Action("I", stage, microbatch)
    elif kind in WAITS:
        yield Action(WAITS[kind], stage, microbatch)  # type: ignore[arg-type]
    else:
        yield Action("L", stage, microbatch)
        yield Action("F", stage, microbatch)
        if not schedule.is_last(stage):
            yield Action("B", stage + 1, microbatch)
            yield Action("I", stage + 1, microbatch)


def _often(times: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(times, f"{times} times")


def _whole(levels: Iterable[Iterable[float]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(level) for level in rank) for rank in levels)


def _bounded(problems: list[str], most: int) -> tuple[str, ...]:
    if len(problems) <= most:
        return tuple(problems)
    return (*problems[:most], f"… and {len(problems) - most} more")


def busy(timing: Timing) -> tuple[float, ...]:
    """Working time of each rank."""
    return tuple(sum(map(sub, end, start)) for start, end in zip(timing.start, timing.end, strict=True))


def bubble(timing: Timing) -> tuple[float, ...]:
    """Time each rank does not work while any rank does: makespan - busy."""
    return tuple(timing.makespan - works for works in busy(timing))


def idle(timing: Timing) -> tuple[float, ...]:
    """Time each rank waits between its own first start and last end.

    The zero-bubble papers count this one: a rank that starts r steps late may run r steps into the next iteration.
    """
    ranks = zip(timing.start, timing.end, busy(timing), strict=True)
    return tuple(ends[-1] - starts[0] - works if starts else 0.0 for starts, ends, works in ranks)
