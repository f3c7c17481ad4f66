"""A schedule as text, for people: a row for each rank and a character for each unit of time."""

from __future__ import annotations

from string import ascii_lowercase

from shardwise.schedules.actions import Action, Schedule
from shardwise.schedules.timing import Cost, time

LEGEND = "forward 0-9, backward or backward for the input a-z, backward for the weights A-Z, idle ."


def draw(schedule: Schedule, cost: Cost | None = None, unit: float = 1) -> str:
    """The lists over time. Microbatch 0 is 0, a or A, the next 1, b or B; after 9 and z they start again.

    Without a cost, all actions of a split schedule take 1 and a whole backward 2. An action shorter than half a unit may
    not show.
    """
    timing = time(schedule, cost or Cost.even(schedule.stages))
    rows = []
    for rank, actions in enumerate(schedule.ranks):
        row = ["."] * round(timing.makespan / unit)
        for action, start, end in zip(actions, timing.start[rank], timing.end[rank], strict=True):
            for cell in range(round(start / unit), round(end / unit)):
                row[cell] = _letter(action)
        rows.append(f"rank {rank:>{len(str(len(schedule.ranks) - 1))}} {''.join(row)}")
    return "\n".join([*rows, LEGEND])


def _letter(action: Action) -> str:
    if action.kind == "F":
        return str(action.microbatch % 10)
    letter = ascii_lowercase[action.microbatch % 26]
    return letter.upper() if action.kind == "W" else letter
