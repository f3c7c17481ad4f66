"""The pictures of docs/pipelines.md, drawn from the lists that the trainer executes, as the planner times them. `python
tests/docs/pipeline_pictures.py` draws them anew."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shardwise.schedules import Action, Cost, Schedule, make_schedule, peak_activations, time

DOCS = Path(__file__).parents[2] / "docs"
COLORS = {
    "F": "#7aa6da",
    "B": "#8fc98f",
    "I": "#a9d8a9",
    "W": "#d9d9a0",
    "E": "#d97a7a",
    "L": "#b48ad9",
    "U": "#222222",
}
UNIT, HIGH, LEFT = 13, 20, 92


class Played(NamedTuple):
    """Some steps of a schedule: what each rank does, from when to when, and the most microbatches that it holds."""

    name: str
    ranks: list[list[tuple[Action, float, float]]]
    most: tuple[float, ...]


def played(name: str, ranks: int, microbatches: int, steps: int = 1) -> Played:
    """Steps with a flush between them, or none where the schedule has none."""
    one = make_schedule(name, ranks, microbatches)
    if any(action.kind == "U" for action in one.ranks[0]):
        return _overlapped(one, steps)
    timing = time(one, Cost.even(one.stages))
    rows = [
        [(a, start + n * timing.makespan, end + n * timing.makespan) for n in range(steps)
         for a, start, end in zip(actions, timing.start[rank], timing.end[rank], strict=True)
         if a.kind not in "EL" or one.placement[a.stage] == rank]
        for rank, actions in enumerate(one.ranks)
    ]  # fmt: skip
    return Played(name, rows, peak_activations(one))


def _overlapped(one: Schedule, steps: int) -> Played:
    """1F1B over the microbatches of all steps, with an update behind the last backward pass of each."""
    m = one.microbatches
    plain = make_schedule("1f1b", len(one.ranks), m * steps)
    timing = time(plain, Cost.even(plain.stages))
    rows = []
    for rank, actions in enumerate(plain.ranks):
        row = []
        for action, start, end in zip(actions, timing.start[rank], timing.end[rank], strict=True):
            row.append((action._replace(microbatch=action.microbatch % m), start, end))
            if action.kind == "B" and action.microbatch % m == m - 1:
                row.append((Action("U", rank, m - 1), end, end))
        rows.append(row)
    return Played(one.name, rows, peak_activations(plain))


PICTURES = {
    "bpipe": (played("1f1b", 4, 8), played("bpipe", 4, 8)),
    "dualpipe": (played("1f1b", 4, 8), played("dualpipe", 4, 8)),
    "pipedream": (played("1f1b", 4, 4, steps=3), played("pipedream-2bw", 4, 4, steps=3)),
}
"""Of each picture, what to compare with and what is explained."""


def rows(one: Played, top: int) -> list[str]:
    """Each rank a row: passes as boxes with their microbatch, handovers and updates as lines."""
    drawn = [f'<text x="0" y="{top - 6}">{one.name}</text>']
    for rank, actions in enumerate(one.ranks):
        y = top + rank * (HIGH + 3)
        drawn.append(f'<text x="0" y="{y + 14}">rank {rank}, holds {one.most[rank]:.0f}</text>')
        for action, start, end in sorted(actions, key=lambda each: each[2] == each[1]):
            x, wide, color = LEFT + UNIT * start, UNIT * (end - start), COLORS[action.kind]
            if not wide:
                drawn.append(
                    f'<rect x="{x - 1.5:.1f}" y="{y - 2}" width="3" height="{HIGH + 4}" fill="{color}">'
                    f"<title>{action}</title></rect>"
                )
                continue
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide - 1:.1f}" height="{HIGH}" fill="{color}">'
                f"<title>{action}</title></rect>"
                f'<text x="{x + wide / 2:.1f}" y="{y + 14}" text-anchor="middle">{action.microbatch}</text>'
            )
    return drawn


def drawn(name: str) -> str:
    """One picture."""
    both = PICTURES[name]
    tall = len(both[0].ranks) * (HIGH + 3) + 30
    parts = [line for n, each in enumerate(both) for line in rows(each, 22 + n * tall)]
    wide = LEFT + UNIT * max(end for each in both for row in each.ranks for _, _, end in row) + 4
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {2 * tall + 8}" font-family="sans-serif" font-size="10">',
        f'<rect width="{wide:.0f}" height="{2 * tall + 8}" fill="white"/>', *parts, "</svg>", "",
    ))  # fmt: skip


if __name__ == "__main__":
    for each in PICTURES:
        (DOCS / f"{each}.svg").write_text(drawn(each), encoding="utf-8")
