"""The pictures of docs/pipelines.md, drawn from the lists that the trainer executes, as the planner times them. `python
tests/docs/pipeline_pictures.py` draws them anew."""

from __future__ import annotations

from pathlib import Path

from shardwise.schedules import Cost, Schedule, make_schedule, peak_activations, time

DOCS = Path(__file__).parents[2] / "docs"
COLORS = {"F": "#7aa6da", "B": "#8fc98f", "I": "#a9d8a9", "W": "#d9d9a0", "E": "#d97a7a", "L": "#b48ad9"}
UNIT, HIGH, LEFT = 13, 20, 92
PICTURES = {"bpipe": ("1f1b", "bpipe", 4, 8)}
"""Of each picture the schedule to compare with, the one that is explained, ranks and microbatches."""


def rows(schedule: Schedule, top: int) -> list[str]:
    """Each rank a row: passes as boxes with their microbatch, handovers as marks; and the most microbatches it holds."""
    cost = Cost.even(schedule.stages)
    timing, drawn = time(schedule, cost), [f'<text x="0" y="{top - 6}">{schedule.name}</text>']
    for rank, actions in enumerate(schedule.ranks):
        y = top + rank * (HIGH + 3)
        drawn.append(f'<text x="0" y="{y + 14}">rank {rank}, most {peak_activations(schedule)[rank]:.0f}</text>')
        for action, start, end in zip(actions, timing.start[rank], timing.end[rank], strict=True):
            x, wide = LEFT + UNIT * start, UNIT * (end - start)
            if action.kind in "EL":
                if schedule.placement[action.stage] == rank:
                    drawn.append(
                        f'<rect x="{x - 1.5:.1f}" y="{y - 2}" width="3" height="{HIGH + 4}" fill="{COLORS[action.kind]}">'
                        f"<title>{action}</title></rect>"
                    )
                continue
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide - 1:.1f}" height="{HIGH}" fill="{COLORS[action.kind]}">'
                f"<title>{action}</title></rect>"
                f'<text x="{x + wide / 2:.1f}" y="{y + 14}" text-anchor="middle">{action.microbatch}</text>'
            )
    return drawn


def drawn(name: str) -> str:
    """One picture."""
    before, after, ranks, microbatches = PICTURES[name]
    schedules = [make_schedule(each, ranks, microbatches) for each in (before, after)]
    tall = ranks * (HIGH + 3) + 30
    parts = [line for n, each in enumerate(schedules) for line in rows(each, 22 + n * tall)]
    wide = LEFT + UNIT * max(time(each, Cost.even(each.stages)).makespan for each in schedules) + 4
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {2 * tall + 8}" font-family="sans-serif" font-size="10">',
        f'<rect width="{wide:.0f}" height="{2 * tall + 8}" fill="white"/>', *parts, "</svg>", "",
    ))  # fmt: skip


if __name__ == "__main__":
    for each in PICTURES:
        (DOCS / f"{each}.svg").write_text(drawn(each), encoding="utf-8")
