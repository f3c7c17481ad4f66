"""An explained profile as sections of a page: what to change first, where the time went, details.

`trace_view` selects what is shown, and `html` renders it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardwise.ledger import Timeline
from shardwise.report import colors, html, html_charts, pick, trace_view, words
from shardwise.report.html import Section, cell, table_of
from shardwise.report.html_timeline import evenly
from shardwise.report.trace_view import Explained

MOST_ROWS = 40
MOST_BARS = 128
CAUSE_COLORS = {
    "host": colors.CATEGORY["host"],
    "synchronisation": "#b58b5b",
    "data": colors.CATEGORY["data"],
    "peer": colors.AXIS["replicate"],
    "pipeline": colors.AXIS["pipeline"],
    "device": colors.CATEGORY["memory"],
    "unknown": colors.UNKNOWN,
}
"""Colours of idle causes; a cause of one axis has the axis's colour."""


def sections(
    explained: Explained, timeline: Timeline, closeup: Timeline | None = None, problems: Sequence[str] = ()
) -> list[Section]:
    """All sections of the page. `timeline` shows all ranks, `closeup` one step of some ranks, kernel by kernel."""
    remark = "Compute of each rank, coloured by category; the thin rows are memory copies and communication by axis."
    found = [
        html.key_figures(trace_view.figures(explained)),
        findings(explained),
        breakdown(explained),
        html.timeline(timeline, "Timeline", remark),
    ]
    if closeup is not None and closeup.spans:
        ranks = sorted({span.rank for span in closeup.spans})
        what = "kernel" if any(explained["devices"].values()) else "operator"
        who = (
            f"rank {ranks[0]}, the slowest"
            if len(ranks) == 1
            else f"ranks {', '.join(map(str, ranks))}, the slowest among them"
        )
        found.append(html.timeline(closeup, f"One step, {what} by {what}", f"Every {what} of {who}."))
    found += [communication(explained), idle(explained), pipeline(explained), modules(explained), kernels(explained)]
    found += [memory(explained), critical_path(explained)]
    remarks = [*problems, *trace_view.remarks(explained)]
    if remarks:
        found.append(html.notes(remarks))
    return [section for section in found if section.body]


def findings(explained: Explained) -> Section:
    """Suggested changes, largest gain first."""
    if not explained["findings"]:
        return Section("What to change", "", "<p>The profile shows nothing worth changing.</p>")
    cards = []
    for at, each in enumerate(explained["findings"], 1):
        evidence = "".join(f"<li>{escape(line)}</li>" for line in each["evidence"])
        gain = f"up to {words.seconds(each['gain'] / 1e9)} a step"
        cost = f"{words.percent(each['share'])} of it, {words.digits(each['gpu_hours_per_day'])} device-hours a day"
        cards.append(
            f'<li class="finding"><h3>{at}. {escape(each["title"])}</h3><p class="gain"><b>{escape(gain)}</b> {escape(cost)}</p>'
            f'<p>{escape(each["advice"][:1].upper() + each["advice"][1:])}.</p><ul class="evidence">{evidence}</ul></li>'
        )
    return Section("What to change first", "Each gain is an upper bound for that change alone; gains do not add up.",
                   f'<ol class="findings">{"".join(cards)}</ol>')  # fmt: skip


def breakdown(explained: Explained) -> Section:
    """The time of each rank by category, and the numbers."""
    ranks = trace_view.categories(explained)
    if not ranks:
        return Section("Where the time went", "", "")
    shown = evenly(list(ranks), MOST_BARS)
    names = list(next(iter(ranks.values())))
    bars = html_charts.rank_bars(trace_view.per_step(explained, {rank: ranks[rank] for rank in shown}), colors.CATEGORY)
    key = html_charts.legend([(name, colors.of_category(name)) for name in names])
    columns = [pick.Column("rank", "rank"), pick.Column("span", "time", words.seconds)]
    columns += [
        pick.Column(n, n.replace("_", " "), words.percent)
        for n in ("compute", "communication", "exposed_communication", "copy", "idle")
    ]
    rows = [
        {
            "rank": rank,
            "span": row["span"] / 1e9,
            **{name: row[name] / max(row["span"], 1) for name in row if name != "span"},
        }
        for rank, row in explained["ranks"].items()
    ]
    remark = "A step by category: each moment is compute, else exposed communication, else idle with its cause."
    numbers = html.ranking_table(rows, columns).body
    folded = f"<details><summary>Every rank in numbers, over all steps</summary>{numbers}</details>"
    return Section("Where the time went", remark, f'<div class="keep">{bars}{key}</div>{folded}')


def communication(explained: Explained) -> Section:
    """Communication by axis and collective, exposed and overlapped."""
    rows = trace_view.axis_rows(explained)
    if not rows:
        return Section("Communication", "", "")
    longest = max(row.seconds for row in rows) or 1.0
    lines, shown = [], trace_view.most_exposed(rows, MOST_ROWS)
    for axis, row in zip(pick.unrepeated(row.axis for row in shown), shown, strict=True):
        color = colors.of_category(row.axis)
        hidden = (row.seconds - row.exposed) / longest
        bar = (
            f'<svg><rect width="{100 * row.exposed / longest:.2f}%" height="13" fill="{color}"/>'
            f'<rect x="{100 * row.exposed / longest:.2f}%" width="{100 * hidden:.2f}%" height="13" fill="{color}" '
            'opacity="0.3"/></svg>'
        )
        lines.append([
            cell(axis, color=axis and color),
            cell(row.collective.replace("_", " ")),
            cell(words.count(round(row.messages)), "n"),
            cell(words.size(row.bytes) if row.bytes else words.DASH, "n"),
            cell(words.seconds(row.seconds), "n"),
            cell(words.seconds(row.exposed), "n"),
            cell(words.percent(row.waiting), "n quiet"),
            cell(words.rate(row.bandwidth, "B") if row.bandwidth else words.DASH, "n quiet"),
            f'<td class="bar" style="width:22%">{bar}</td>',
        ])  # fmt: skip
    heads = ["axis", "collective", "messages", "sent", "time", "exposed", "of it waiting", "bus bandwidth", ""]
    remark = "One step of one rank, mean of the ranks. Full colour: exposed; pale: overlapped by compute."
    return Section("Communication", remark, table_of(heads, lines, numbers_from=2, wide=True) + _more(len(rows)))


def idle(explained: Explained) -> Section:
    """Idle time of the devices by cause."""
    causes = trace_view.idle_by_cause(explained)
    if not causes:
        return Section("Idle", "", "")
    ranks = {rank: {name: row.get(name, 0) for name in causes} for rank, row in explained["idle"].items()}
    shown = evenly(list(ranks), MOST_BARS)
    bars = html_charts.rank_bars(trace_view.per_step(explained, {rank: ranks[rank] for rank in shown}), CAUSE_COLORS)
    key = html_charts.legend(
        [(f"{name}, {words.seconds(took)}", CAUSE_COLORS.get(name, colors.UNKNOWN)) for name, took in causes.items()]
    )
    remark = "Time without activity on the device: late launches, synchronisation, data, other ranks, another stage."
    return Section("Idle by cause", remark, f'<div class="keep">{bars}{key}</div>')


def pipeline(explained: Explained) -> Section:
    """The executed schedule, of the pipeline and step with the largest bubble."""
    step = trace_view.pipeline_of(explained)
    if step is None:
        return Section("Pipeline", "", "")
    name, bubble = trace_view.executed(explained, step)
    remark = (
        f"As executed: {name}, {step['stages_per_rank']} stages a rank. Bubble {bubble} over {len(explained['pipelines'])} "
        f"pipelines and steps; shown is the worst, ranks {', '.join(map(str, step['members']))} in step {step['step']}."
    )
    passes = [("forward", "F"), ("backward", "B"), ("backward_input", "I"), ("backward_weight", "W")]
    used = {action[:1] for rank in step["ranks"].values() for action in rank["actions"]}
    key = html_charts.legend([(name.replace("_", " "), colors.PASS[name]) for name, letter in passes if letter in used])
    return Section("Pipeline", remark, f'<div class="keep">{html_charts.action_order(step)}{key}</div>')


def modules(explained: Explained) -> Section:
    """Device time by module."""
    rows = trace_view.module_rows(explained)
    if not rows:
        return Section("Modules", "", "")
    longest = rows[0].seconds or 1.0
    names = [name for name in rows[0].passes if any(row.passes[name] for row in rows)]
    lines = []
    for row in rows[:MOST_ROWS]:
        layers = f" ×{row.layers}" if row.layers > 1 else ""
        bar = f'<td class="bar" style="width:20%">{html_charts.small_bar(row.seconds / longest, colors.CATEGORY["matmul"])}</td>'
        lines.append([
            cell(row.name + layers),
            *(cell(words.seconds(row.passes[name]) if row.passes[name] else words.DASH, "n quiet") for name in names),
            cell(words.seconds(row.seconds), "n"),
            cell(words.percent(row.share), "n"),
            cell(words.flops(row.speed, "FLOP/s") if row.speed else words.DASH, "n quiet"),
            bar,
        ])  # fmt: skip
    attributed = explained["modules"]["attributed"]
    least = f" At least {words.percent(min(attributed.values()))} of a rank's time is attributed." if attributed else ""
    remark = f"Device time of kernels each module launched itself, per step and rank; layers alike are summed.{least}"
    heads = ["module", *names, "time", "share", "speed", ""]
    return Section("Modules", remark, table_of(heads, lines, numbers_from=1, wide=True) + _more(len(rows)))


def kernels(explained: Explained) -> Section:
    """The kernels that took longest."""
    rows = explained["kernels"]
    if not rows:
        return Section("Kernels", "", "")
    divisor = trace_view.steps_of(explained, explained["seen"])
    lines = [
        [
            f'<td data-tip="{escape(row["name"][:300])}">{escape(name)}</td>',
            cell(row["kind"], "quiet"),
            cell(words.count(round(calls)) if (calls := row["count"] / divisor) >= 1 else f"{calls:.2f}", "n"),
            cell(words.seconds(row["total"] / row["count"] / 1e9) if row["count"] else words.DASH, "n quiet"),
            cell(words.seconds(row["longest"] / 1e9), "n quiet"),
            cell(words.seconds(row["total"] / divisor / 1e9), "n"),
            cell(words.percent(row["share"]), "n"),
        ]
        for row, name in zip(
            rows, trace_view.short_kernels([row["name"] for row in rows[:MOST_ROWS]], 90), strict=False
        )
    ]
    heads = ["kernel", "kind", "calls", "each", "longest", "time", "share"]
    remark = "Per step and rank, longest first; without a device, operators by self time."
    return Section("Kernels", remark, table_of(heads, lines, numbers_from=2, wide=True) + _more(len(rows)))


def memory(explained: Explained) -> Section:
    """Memory over time."""
    curves = trace_view.memory_curves(explained)
    if not curves:
        return Section("Memory", "", "")
    chart, key = html_charts.memory_lines(curves)
    ranks = len([1 for each in explained["memory"].values() if each])
    some = f" The {len(curves)} of {ranks} ranks with the highest peak." if ranks > len(curves) else ""
    return Section(
        "Memory",
        f"Bytes allocated over the steps.{some}",
        f'<div class="keep">{chart}{html_charts.legend(key)}</div>',
    )


def critical_path(explained: Explained) -> Section:
    """The chain of work and waiting across ranks that determines the step time."""
    path = explained["critical_path"]
    if not path or not path["length"]:
        return Section("Critical path", "", "")
    kinds = {
        "compute": colors.CATEGORY["matmul"],
        "copy": colors.CATEGORY["memory"],
        "host": colors.CATEGORY["host"],
        "idle": colors.CATEGORY["bubble"],
    }
    parts = sorted(path["categories"].items(), key=lambda pair: -pair[1])
    bar = html_charts.stacked_bar(
        [
            (name, took / 1e9, kinds.get(name) or colors.of_category(name.removeprefix("communication ")))
            for name, took in parts
            if took
        ]
    )
    ranks = sorted(path["ranks"].items(), key=lambda pair: -pair[1])[:6]
    through = ", ".join(f"rank {rank} {words.percent(took / path['length'])}" for rank, took in ranks)
    remark = (
        f"The chain of work and waiting across ranks that determines the {words.seconds(path['length'] / 1e9)} of all steps; "
        f"speeding up anything else gains nothing. Through {through}."
    )
    return Section("Critical path", remark, f'<div class="keep">{bar}</div>')


def _more(count: int) -> str:
    return f'<p class="remark">{count - MOST_ROWS:,} more are in the JSON.</p>' if count > MOST_ROWS else ""
