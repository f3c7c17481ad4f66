"""The page as one file: style, scripts, controls and the first answer are embedded, so that one request loads it and an exported
page opens from disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from shardwise.report import colors, html
from shardwise.run import read_planned, to_dict
from shardwise.workbench.answer import Planned
from shardwise.workbench.controls import panel
from shardwise.workbench.question import Base

PARTS = (
    ("memory", "Memory"),
    ("time", "Time"),
    ("timeline", "One step"),
    ("traffic", "Traffic"),
    ("notes", "Notes"),
)
"""Sections that the planner's drawings fill, from top to bottom."""


SCRIPTS = ("workbench.js", "beside.js", "anatomy.js", "picture.js")


def workbench_page(
    base: Base,
    first: bytes,
    nonce: str,
    run: str | None = None,
    watched: bool = False,
    more: Mapping[str, Any] | None = None,
) -> str:
    """The page with the answer to its first question; `run` is the server's name for the run, if it has several. `more` is the
    data that a page without a server carries."""
    answer = json.loads(first)
    state: dict[str, Any] = {"given": base.given, "first": answer, "colors": colors.CATEGORY | colors.OWNER}
    if run is not None:
        state["run"] = run
    state |= more or {}
    body = (
        _header(base.given.get("name", "run"), watched)
        + f'<main><form id="controls" aria-label="Run" autocomplete="off">{_controls(base, answer)}</form>'
        + f'<div id="results">{_results()}</div></main>'
    )
    return document("Workbench", body, state, SCRIPTS, nonce)


def document(title: str, body: str, state: Any, scripts: tuple[str, ...], nonce: str) -> str:
    """A complete page with these scripts, besides those that every page has; without a nonce, for a standalone file."""
    marked = f' nonce="{nonce}"' if nonce else ""
    charts = _text("shardwise.workbench", "uplot/uPlot.min.css") if any("uplot" in name for name in scripts) else ""
    # The library's style comes first, so that ours may override it.
    style = charts + _text("shardwise.report", "page.css") + _text("shardwise.workbench", "workbench.css")
    code = [_text("shardwise.report", "page.js"), *(_text("shardwise.workbench", name) for name in scripts)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body>{body}"
        f'<script type="application/json" id="state">{in_script(state)}</script><div id="tip"></div>'
        + "".join(f"<script{marked}>\n{text}</script>" for text in code)
        + "</body></html>\n"
    )


def in_script(content: Any) -> str:
    """JSON inside a script element, which "<" could end."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def offline_page(found: Planned) -> str:
    """The plan alone, as `shardwise plan --html` writes it."""
    best = found.best
    remark = f"{best.run.layout.world} × {best.job.cluster.chip.name}"
    notes = found.sections["notes"]
    sections = [each for each in found.sections.values() if each is not notes]
    return html.page(f"Plan of {best.run.name}", [*sections, found.timeline(), notes], remark)


def _controls(base: Base, answer: dict[str, Any]) -> str:
    """The controls with the values of the first run, or with the defaults if that run has a mistake."""
    if "plan" in answer:
        return panel(answer["plan"]["run"])
    return panel(to_dict(read_planned(None, []).run))


def watch_page(name: str, nonce: str) -> str:
    """The page of watched runs, which requests all data that it shows."""
    parts = (
        '<section id="latest" aria-label="Now"><div class="body"></div></section>'
        '<section id="charts" aria-label="Charts"><div class="body"></div></section>'
        '<section id="ranks" aria-label="Ranks"><h2>Ranks</h2><p class="remark"></p><div class="body"></div></section>'
        '<section id="samples" aria-label="Samples" hidden><h2>Samples of text</h2><p class="remark"></p>'
        '<div class="body"></div></section>'
        '<section id="events" aria-label="Events"><h2>Events</h2><div class="body"></div></section>'
    )
    body = (
        f'<header class="bar"><h1>{escape(name)}</h1><p class="remark" id="headline"></p><div class="actions">'
        '<button type="button" data-action="whole">Whole run</button></div><p id="said" role="status"></p></header>'
        f'<main><form id="runs" aria-label="Runs"></form><div id="results">{parts}</div></main>'
    )
    return document("Watch", body, {}, ("uplot/uPlot.iife.min.js", "watch.js"), nonce)


def _header(name: str, watched: bool) -> str:
    buttons = "".join(
        f'<button type="button" data-action="{action}" data-tip="{escape(tip)}">{label}</button>'
        for action, label, tip in (
            ("pin", "Compare", "Keep this layout beside those that follow"),
            ("reset", "Reset", "Back to the run that the page began with"),
            ("link", "Copy link", "The address that holds this view"),
            ("command", "Copy command", "The command that prints this plan"),
            ("run", "Run file", "The run as a TOML file, to plan or to train"),
            ("picture", "Picture", "The charts as one picture"),
            ("page", "Page", "This plan as a page that opens offline"),
        )
    )
    watch = '<a data-action="watch" href="/watch">Watch runs</a>' if watched else ""
    return (
        f'<header class="bar"><h1>{escape(name)}</h1><p class="remark" id="headline"></p>'
        f'<div class="actions">{watch}{buttons}</div><p id="said" role="status"></p></header>'
    )


def _results() -> str:
    parts = "".join(
        f'<section id="{name}" aria-label="{title}"><h2>{title}</h2><p class="remark"></p><div class="body"></div></section>'
        for name, title in PARTS
    )
    return (
        '<div id="problems" role="alert"></div><section id="figures" aria-label="Key figures"><div class="body"></div></section>'
        '<section id="changes" aria-label="What would make this faster"><h2>What would make this faster</h2>'
        '<div class="chips" role="group" aria-label="Changes"></div></section>'
        '<section id="compared" aria-label="Side by side" hidden><h2>Side by side</h2><div class="body"></div></section>'
        f"{parts}"
        '<section id="ranking" aria-label="Best layouts"><h2>Best layouts</h2><p class="remark"></p>'
        '<div class="body"></div></section>'
        '<section id="model" aria-label="Model"><h2>The model</h2><p class="remark"></p><div class="body"></div></section>'
        '<section id="mesh" aria-label="Mesh of ranks"><h2>The mesh of ranks</h2><p class="remark">Point at a rank, or move '
        'with the arrow keys, to see what it holds and whom it talks to.</p><div class="body"><canvas tabindex="0" role="img" '
        'aria-label="The ranks of the layout"></canvas><div class="legend"></div><div class="held"></div></div></section>'
    )


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text("utf-8")
