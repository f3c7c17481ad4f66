"""Runs watched in a real browser."""

from __future__ import annotations

import json
import math
import os
import random
from importlib.resources import files
from pathlib import Path

import pytest
from chromium import CHROMIUM, Browser, browser
from served import served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

RUN = '[model]\npreset = "llama3-8b"\n[layout]\nshard = 8\n[cluster]\nchip = "h100"\n[train]\nglobal_batch = 8\n'


def record(step: int, source: random.Random) -> str:
    loss = 3 + 5 * math.exp(-step / 3e4) + source.random() / 4
    return json.dumps(
        dict(step=step, loss=loss, grad_norm=source.random(), lr=3e-4, tokens=step * 1000, tokens_per_s=5e4, seconds=0.2,
             mfu=0.4, memory_gib=10.5)
    ) + "\n"  # fmt: skip


def write(folder: Path, steps: range) -> None:
    folder.mkdir(exist_ok=True)
    source = random.Random(steps.start)
    (folder / "run.toml").write_text(RUN)
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(record(step, source) for step in steps)


def headline(page: Browser) -> str:
    return page.js("document.getElementById('headline').textContent")


@pytest.mark.drawn(group="browser")
def test_runs_are_shown_and_followed(tmp_path: Path) -> None:
    write(tmp_path / "one", range(1, 200))
    write(tmp_path / "two", range(1, 400))
    (tmp_path / "one" / "events.jsonl").write_text(
        '{"time": 1e9, "what": "saved", "step": 50, "seconds": 1, "command": "a"}\n'
    )
    with served("watch", str(tmp_path)) as watch, browser() as page:
        page.viewport(1366, 900)
        page.open(watch.address)
        assert headline(page) == f"{8 * (199 + 399):,} points"
        assert page.js("document.querySelectorAll('#charts canvas').length") == 7
        assert "checkpoint" in page.js("document.getElementById('events').textContent")
        assert "planned" in page.js("document.getElementById('latest').textContent")
        page.js(files("axe_core_python").joinpath("axe.min.js").read_text("utf-8") + "; 0")
        found = page.js("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
        assert not [each["id"] for each in found if each["impact"] in ("serious", "critical")]
        write(tmp_path / "one", range(200, 300))
        page.until(f"document.getElementById('headline').textContent.startsWith('{8 * (299 + 399):,}')")
        page.click("#runs input")  # without the first
        page.until("!document.querySelector('#charts').textContent.includes('one')")
        # A range is drawn by the mouse, and given up again.
        x, y = page.middle("#charts .u-over")
        page.drag(x, x + 80, y)
        page.click("[data-action=whole]")
        # Samples of text appear with the evaluation that made them; what they say is text, whatever it looks like.
        assert page.js("document.getElementById('samples').hidden")
        with open(tmp_path / "two" / "metrics.jsonl", "a") as file:
            for step in (400, 401):
                texts = [dict(prompt="def ", text=f"<b>main</b>() {step}")]
                file.write(json.dumps(dict(step=step, eval_loss=2.5, samples=texts)) + "\n")
        page.until("document.querySelectorAll('#samples details').length === 2")
        assert page.js("document.querySelector('#samples details[open] pre').textContent") == "def <b>main</b>() 401"
        page.js("document.querySelectorAll('#samples summary')[1].focus(); 0")
        page.press("Enter", 13, "\r")
        page.until("document.querySelectorAll('#samples details[open]').length === 2")
        # The plan of a run is one click away, and the way back.
        page.open(page.js("document.querySelector('.run a').href"))
        assert page.js("document.querySelector('[data-quantity=\"run.model.preset\"]').textContent") == "llama3-8b"
        page.click("[data-action=watch]")
        page.until("document.querySelectorAll('#charts canvas').length === 7")
        assert not page.complaints


@pytest.mark.drawn(group="browser")
def test_runs_that_are_not_shown_are_told(tmp_path: Path) -> None:
    for number in range(67):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "metrics.jsonl").write_text(record(1, random.Random(number)))
    with served("watch", str(tmp_path)) as watch, browser() as page:
        page.open(watch.address)
        assert headline(page) == f"{8 * 64} points; the first 64 runs by name, 3 more are not shown"


@pytest.mark.large("a million points: that their number does not matter to the page, nor following them to the machine")
def test_a_million_points_are_drawn_at_once_and_followed_for_little(tmp_path: Path) -> None:
    write(tmp_path / "long", range(1, 125_001))
    with served("watch", str(tmp_path)) as watch, browser() as page:
        page.viewport(1366, 900)
        page.open(watch.address)
        page.until("document.getElementById('headline').textContent === '1,000,000 points'")
        page.js("delete document.getElementById('results').dataset.milliseconds; 0")
        page.click("[data-action=whole]")
        drawn = float(page.until("document.getElementById('results').dataset.milliseconds"))
        before = cpu_seconds(watch.process.pid)
        began = page.js("performance.now()")
        for step in range(125_001, 125_021):
            write(tmp_path / "long", range(step, step + 1))
            page.until(f"document.getElementById('headline').textContent.startsWith('{8 * step:,}')")
        took = (page.js("performance.now()") - began) / 1000
        used = cpu_seconds(watch.process.pid) - before
        print(f"drawn in {drawn} ms; {took / 20:.2f} s until a line is seen; {used / took:.1%} of a core")
        assert used / 20 < 0.05  # seconds of the server for a new line, however many there are before it
        assert not page.complaints


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
