"""The page of a profile: its numbers are the answers', it stays small for many ranks, and it works in a real browser, alone."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import trace_made
from browser import CHROMIUM, opened
from test_html import Reader

from shardwise.cli.main import main
from shardwise.report import trace_view, words

RANKS, EVENTS = 64, 480


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made job of many ranks."""
    folder = tmp_path_factory.mktemp("made")
    for rank in range(RANKS):
        trace_made.write(folder / f"rank-{rank}.json.gz", EVENTS, rank, RANKS)
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    """Its page, as the verb writes it."""
    assert (
        main(
            [
                "trace",
                str(folder),
                "--no-cache",
                "--html",
                str(folder / "page.html"),
                "--perfetto",
                str(folder / "all.json.gz"),
            ]
        )
        == 0
    )
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.mark.drawn(group="browser")
def test_many_ranks_make_a_small_sound_page(page: str) -> None:
    assert len(page.encode()) < 5_000_000
    assert "http" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)
    reader = Reader(page)
    for title in (
        "What to change",
        "Where the time went",
        "Timeline",
        "One step, kernel by kernel",
        "Communication",
        "Kernels",
    ):
        assert title in reader.text
    whole, close = reader.data
    assert sum(bool(row["label"]) for row in whole["rows"]) == RANKS
    assert close["rows"][0]["label"].startswith("rank ")
    assert len(close["names"]) > len(whole["names"]) / 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.drawn(group="browser")
def test_the_timeline_zooms_in_a_real_browser(page: str) -> None:
    script = """
    // A browser without a screen draws frames when it likes, so drawing is put on the clock that the test waits by.
    window.requestAnimationFrame = function (draw) { return setTimeout(draw, 16); };
    var canvas = document.querySelector("canvas"), place = canvas.closest(".timeline"), first = canvas.toDataURL();
    var plus = place.querySelector("button[value='0.5']"), all = place.querySelector("button[value='all']");
    function width() { return Number(canvas.dataset.to) - Number(canvas.dataset.from); }
    all.click();
    var whole = width();
    plus.click(); plus.click();
    var zoomed = width(), box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -200, ctrlKey: true, clientX: box.left + 600, cancelable: true }));
    var wheeled = width();
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", cancelable: true }));
    var from = Number(canvas.dataset.from);
    setTimeout(function () {
      var second = canvas.toDataURL();
      tell({ whole: whole, zoomed: zoomed, wheeled: wheeled, from: from, drawn: first.length > 5000, changed: first !== second,
             wide: document.documentElement.scrollWidth, canvases: document.querySelectorAll("canvas").length });
    }, 400);
    """
    found = opened(page, script)
    assert found["wrong"] == []
    assert found["fetched"] == []
    assert found["canvases"] == 2
    assert found["zoomed"] == pytest.approx(found["whole"] / 4, rel=1e-6)
    assert found["wheeled"] < found["zoomed"] / 2
    assert found["from"] > 0
    assert found["drawn"]
    assert found["changed"]
    assert found["wide"] <= 1366  # nothing sticks out of a laptop's screen


def test_perfetto_has_every_rank_by_axis(folder: Path, page: str) -> None:
    with gzip.open(folder / "all.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {f"run: rank {rank}" for rank in range(RANKS)} <= named
    assert len([e for e in events if e["ph"] == "X"]) > RANKS * 40


def test_an_explanation_with_nothing_in_it_still_makes_a_page() -> None:
    from shardwise.ledger import Timeline
    from shardwise.report import html, html_trace

    page = html.page("nothing", html_trace.sections(EMPTY, Timeline()))
    assert "nothing worth changing" in Reader(page).text


EMPTY: dict[str, Any] = dict(
    world=1, seen=(0,), devices={0: ""}, steps=(), step_time=0, spreads={}, clocks={}, axes=[], categories={}, idle={},
    ranks={0: dict(span=0, compute=0, communication=0, copy=0, idle=0, exposed_communication=0)}, exposed_copy={}, kernels=[],
    calls=[], modules=dict(rows=[], attributed={}, in_modules={}), launches={}, pipelines=[], stragglers=[], critical_path=None,
    memory={}, flops=dict(convention="", ranks={}, peak=0.0, utilisation={}), findings=[], waits={}, unseen=(),
)  # fmt: skip


def test_figures_are_means_over_ranks_and_steps() -> None:
    ranks = {
        0: dict(span=100, compute=60, communication=50, copy=0, idle=10, exposed_communication=30),
        1: dict(span=200, compute=100, communication=100, copy=0, idle=60, exposed_communication=40),
    }
    moved = dict(
        messages=4, bytes=800.0, payload=0.0, sized=4, time=50, exposed=30, summed=50, wait=25, matched=4, timed=25
    )
    axes = [dict(axis="tensor", collective="all_gather", group=2, ranks={0: moved, 1: moved | dict(exposed=40)})]
    explained = EMPTY | dict(ranks=ranks, seen=(0, 1), world=8, steps=(3, 4), axes=axes, step_time=100)
    said = {name: value for name, value, _ in trace_view.figures(explained)}
    assert said["compute"] == words.percent((0.6 + 0.5) / 2)
    assert said["exposed or idle"] == f"{words.digits(((0.3 + 0.2) / 2 + (0.1 + 0.3) / 2) * 8 * 24)} h"
    row = trace_view.axis_rows(explained)[0]
    assert (row.messages, row.bytes, row.exposed, row.waiting) == (2, 400, pytest.approx(17.5e-9), 0.5)
    assert row.bandwidth == 1600 * 1e9 / 50


def test_layers_are_folded() -> None:
    rows = [
        dict(module=f"layers.{n}.ffn", passes=dict(forward=10, backward=20), kernels=2, flops=60.0, ranks={0: 30})
        for n in range(3)
    ]
    explained = EMPTY | dict(modules=dict(rows=rows, attributed={0: 1.0}, in_modules={0: 1.0}))
    (row,) = trace_view.module_rows(explained)
    assert (row.name, row.layers, row.share) == ("layers.*.ffn", 3, 1.0)
    assert row.seconds == pytest.approx(90e-9)
    assert row.speed == pytest.approx(180 / 90e-9)
