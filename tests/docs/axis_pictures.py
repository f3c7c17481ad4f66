"""The pictures of the axes' pages: what a rank holds with and without the axis and a step's timeline by the plan, and a step as
four processes made it. `python tests/docs/axis_pictures.py [AXIS …]` draws them anew from today's plan and the recorded steps; with
`--record` it records these first, on the cores of this machine (`shardwise profile`, some minutes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardwise.ledger import OWNERS, Span, Timeline
from shardwise.plan.plan import Plan, plan
from shardwise.plan.time.timeline import timeline
from shardwise.report import colors, pick, words
from shardwise.report.html_timeline import timeline_rows
from shardwise.run import read_run

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples" / "axes.toml"
RECORDED = Path(__file__).with_name("axis_steps.json")
EXPERTS = ("model.experts=8", "model.experts_per_token=2", "model.expert_ffn=256")
AXES = {
    "replicate": ("layout.replicate=4",),
    "shard": ("layout.shard=4", "layout.zero=3"),
    "tensor": ("layout.tensor=4",),
    "pipeline": ("layout.pipeline=4",),
    "context": ("layout.context=4",),
    "expert": ("layout.shard=4", "layout.expert=4", *EXPERTS),
}
"""What the pages add to the run, by axis."""
ALONE = {"expert": EXPERTS}
"""What the run on one rank has, where that is not the run as it is."""
WIDTH, LEFT, LINE = 760, 92, 16
PIXELS = 300


def known() -> dict[str, Any]:
    """The recorded steps by axis."""
    return json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}


def picture(axis: str) -> Path:
    """The file of an axis."""
    return ROOT / "docs" / f"axis-{axis}.svg"


def drawn(axis: str) -> str:
    """The picture, from today's plan and the recorded step."""
    alone, split = (plan(read_run(RUN, list(keys))) for keys in (ALONE.get(axis, ()), AXES[axis]))
    recorded = known().get(axis)
    planned = timeline(split.job)
    seen = {pick.kind_of(span): colors.of_span(span) for span in planned.spans}
    parts: list[str] = []
    at = _memory(parts, 18, {"1 rank": alone, "each of 4": split})
    step = words.seconds(split.account.step_seconds)
    at = _timeline(parts, at + 14, f"one planned step on four H100s: {step}", planned)
    if recorded is not None:
        spans = tuple(Span(rank, *rest) for rank, *rest in recorded["spans"])
        title = f"one recorded step of four processes on {recorded['cores']} CPU cores: {words.seconds(recorded['seconds'])}"
        at = _timeline(parts, at + 14, title, Timeline(spans, recorded["seconds"]))
        seen |= {pick.kind_of(span): colors.of_span(span) for span in spans}
    at = _legend(parts, at + 12, [(name.replace("_", " "), color) for name, color in seen.items()])
    style = "<style>text{font:12px sans-serif;fill:#808080}.b{font-weight:bold}</style>"
    name = f"{axis}: memory of a rank and a step of four"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at}" role="img" aria-label="{name}">'
    return "\n".join([head, f"<title>{name}</title>", style, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{kind}>{escape(text)}</text>'


def _memory(parts: list[str], at: int, plans: dict[str, Plan]) -> int:
    """A bar of each plan's fullest rank by owner; returns where the picture goes on."""
    parts.append(_text(0, at, "planned memory of the fullest rank, without the CUDA context", ' class="b"'))
    bars = {name: max(each.account.memory.ranks, key=lambda rank: sum(rank.values())) for name, each in plans.items()}
    owners = [owner for owner in OWNERS if owner != "workspace" and any(bar.get(owner, 0) for bar in bars.values())]
    most = max(sum(bar.get(owner, 0) for owner in owners) for bar in bars.values())
    at += 8
    for name, bar in bars.items():
        parts.append(_text(0, at + 12, name))
        x = float(LEFT)
        for owner in owners:
            width = bar.get(owner, 0) / most * (WIDTH - LEFT - 90)
            color = colors.of_owner(owner)
            parts.append(f'<rect x="{x:.1f}" y="{at}" width="{width:.1f}" height="{LINE - 2}" fill="{color}"/>')
            x += width
        parts.append(_text(round(x + 6), at + 12, words.size(sum(bar.get(owner, 0) for owner in owners))))
        at += LINE + 2
    return _legend(parts, at + 10, [(owner, colors.of_owner(owner)) for owner in owners])


def _timeline(parts: list[str], at: int, title: str, line: Timeline) -> int:
    """A row for each stream of each rank; returns where the picture goes on."""
    parts.append(_text(0, at, title, ' class="b"'))
    at += 8
    scale = (WIDTH - LEFT) / line.seconds
    drawn_rows: set[tuple[int, str]] = set()
    for row in timeline_rows(line, 4000):
        which = row.spans[0].rank, row.stream
        if which in drawn_rows:  # what a stream does at the same time, threads of a CPU, is left out
            continue
        drawn_rows.add(which)
        high = LINE - 2 if row.stream == "compute" else 6
        if row.label:
            parts.append(_text(0, at + 12, row.label))
        for span in row.spans:
            x, width = LEFT + span.start * scale, max(0.3, span.seconds * scale)
            color = colors.of_span(span)
            parts.append(f'<rect x="{x:.1f}" y="{at}" width="{width:.1f}" height="{high}" fill="{color}"/>')
        at += high + 2
    return at + 8


def _legend(parts: list[str], at: int, names: Sequence[tuple[str, str]]) -> int:
    x = LEFT
    for name, color in names:
        parts.append(f'<rect x="{x}" y="{at - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(_text(x + 14, at, name))
        x += 22 + 7 * len(name)
    return at + 14


def record(axis: str) -> dict[str, Any]:
    """One step of four processes, as the profiler saw it."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "shardwise"]
        keys = [f"--{key}" for key in AXES[axis]]
        options = ["--out", folder, "--steps", "1"]
        subprocess.run([*command, "profile", str(RUN), *keys, *options], check=True, env=environment)
        said = subprocess.run(
            [*command, "trace", folder, "--json", "--no-cache"], check=True, env=environment, stdout=-1
        )
    found = json.loads(said.stdout)["timeline"]
    line = Timeline(tuple(Span(**span) for span in found["spans"]), found["seconds"])
    spans = [
        [span.rank, span.stream, "", span.category, round(span.start, 5), round(span.seconds, 5)]
        for row in timeline_rows(line, PIXELS * 8)
        for span in row.spans
        if span.stream in ("compute", *colors.AXIS) and span.seconds >= 1e-4
    ]
    ranks = {rank for rank, *_ in spans}
    return dict(seconds=line.seconds, cores=len(os.sched_getaffinity(0)), ranks=len(ranks), spans=spans)


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != "--record"] or list(AXES)
    for each in named:
        if "--record" in sys.argv:
            RECORDED.write_text(
                json.dumps({**known(), each: record(each)}, separators=(",", ":")) + "\n", encoding="utf-8"
            )
        picture(each).write_text(drawn(each), encoding="utf-8")
