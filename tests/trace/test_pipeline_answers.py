"""The executed schedule and its bubble: profiles made from a schedule that was played, on the host and on a device."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path

import pytest
from made_jobs import Host, explained, job_member, message
from schedule_check import bubble, busy

from shardwise.ledger import as_dict
from shardwise.report import html_charts
from shardwise.schedules import Action, Cost, make_schedule, time
from shardwise.trace.answers import Explanation
from shardwise.trace.pipeline import Executed, played, read_action
from shardwise.trace.spans.intervals import empty

CASES = [
    ("1f1b", 2, 4, 1),
    ("gpipe", 3, 4, 1),
    ("interleaved", 2, 4, 2),
    ("zb-h1", 3, 5, 1),
    ("zb-v", 2, 4, 2),
    ("dualpipe", 4, 8, 2),
]


def made(
    folder: Path, name: str, ranks: int, microbatches: int, chunks: int, on_device: bool, order: int = 1
) -> Explanation:
    """A step of a pipeline as `schedules.time` plays it, written as profiles of all its ranks."""
    schedule = make_schedule(name, ranks, microbatches, chunks)
    stages = schedule.stages
    cost = Cost([100 + 10 * s for s in range(stages)], [90 + 5 * s for s in range(stages)], [80] * stages)
    timing = time(schedule, cost)
    groups = {"8": ("pipeline", tuple(range(ranks))), "9": ("pipeline_back", tuple(range(ranks)))}
    files = {}
    for rank in range(ranks):
        host, before = Host(), 0
        host.step(0, 0, int(timing.makespan) + 1000)
        for action, start, end in zip(schedule.ranks[rank][::order], timing.start[rank], timing.end[rank], strict=True):
            start, end = int(start), int(end)
            host.span("cpu_op", f"shardwise:action {action}", before, end - before)
            if on_device:
                if start > before:
                    host.launch(
                        "ncclDevKernel_SendRecv", before, before, start - before, 9, **message("recv", 4, "8", 2)
                    )
                host.launch("gemm", before, start, end - start)
            else:
                if start > before:
                    host.span("user_annotation", "gloo:recv", before, start - before)
                host.span("cpu_op", "aten::mm", start, end - start)
            before = end
        files[rank] = (job_member(rank, ranks, groups), host.events)
    return explained(folder, files)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_the_bubble_is_that_of_the_schedule(
    tmp_path: Path, name: str, ranks: int, microbatches: int, chunks: int, on_device: bool
) -> None:
    (step,) = made(tmp_path, name, ranks, microbatches, chunks, on_device).pipelines
    schedule = make_schedule(name, ranks, microbatches, chunks)
    stages = schedule.stages
    cost = Cost([100 + 10 * s for s in range(stages)], [90 + 5 * s for s in range(stages)], [80] * stages)
    timing = time(schedule, cost)
    for one in step.ranks.values():
        assert len(one.times) == len(one.actions)
        assert sum(end - start for start, end in one.times) == one.work
    assert (step.schedule, step.members, step.window) == (name, tuple(range(ranks)), timing.makespan)
    assert (step.stages_per_rank, step.microbatches) == (chunks, microbatches)
    for rank, one in step.ranks.items():
        assert one.actions == tuple(map(str, schedule.ranks[rank]))
        assert (one.work, one.bubble) == (busy(timing)[rank], bubble(timing)[rank])
        assert one.bubble == one.scheduled == one.instant
    assert step.share == pytest.approx(sum(bubble(timing)) / timing.makespan / ranks)


def test_another_order_is_no_known_schedule(tmp_path: Path) -> None:
    (step,) = made(tmp_path, "1f1b", 2, 4, 1, False, order=-1).pipelines
    assert step.schedule == ""


def test_a_missing_rank(tmp_path: Path) -> None:
    host = Host()
    host.span("cpu_op", "shardwise:action F0.0", 0, 50)
    host.span("cpu_op", "aten::mm", 5, 40)
    member = job_member(0, 2, {"8": ("pipeline", (0, 1))})
    (step,) = explained(tmp_path, {0: (member, host.events)}).pipelines
    assert (step.schedule, step.members, list(step.ranks)) == ("", (0, 1), [0])


def test_playing() -> None:
    def actions(*texts: str, works: tuple[int, ...]) -> Executed:
        read = [read_action(text) for text in texts]
        assert None not in read
        return Executed(tuple(one for one in read if one), (0, *accumulate(works)), empty())

    parts = [actions("F0.0", "B0.0", works=(10, 20)), actions("F1.0", "B1.0", works=(11, 21))]
    assert played(parts, {}) == 10 + 11 + 21 + 20
    assert played(parts, {Action("F", 0, 0): 5}) == 10 + 5 + 11 + 21 + 20
    assert played([actions("B0.0", works=(1,)), actions("F1.0", works=(1,))], {}) is None
    assert [read_action(text) for text in ("F2.15", "W0.0", "X1.1", "F1", "F.1", "")] == [
        Action("F", 2, 15), Action("W", 0, 0), None, None, None, None,
    ]  # fmt: skip


def test_the_bubble_is_drawn_as_gaps(tmp_path: Path) -> None:
    """What a rank's row leaves blank is its bubble, and a rank that begins late is drawn to begin late."""
    (step,) = made(tmp_path, "gpipe", 3, 4, 1, True).pipelines
    drawing = html_charts.action_order(as_dict(step))
    rows: dict[str, list[tuple[float, float]]] = {}
    for x, width, rank in re.findall(r'x="([\d.]+)"[^>]*? width="([\d.]+)"[^>]*?rank (\d): ', drawing):
        rows.setdefault(rank, []).append((float(x), float(width)))
    assert [len(row) for row in rows.values()] == [8, 8, 8]
    assert rows["0"][0][0] < rows["1"][0][0] < rows["2"][0][0]
    room = max(x + width for row in rows.values() for x, width in row) - rows["0"][0][0]
    for rank, row in rows.items():
        blank = 1 - sum(width + 1 for _, width in row) / room
        assert blank == pytest.approx(step.ranks[int(rank)].bubble / step.window, abs=0.03)
