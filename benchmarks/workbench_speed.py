"""How soon the pages show what changed, in headless Chromium: from a turned control of a run of Llama 3 405B on 16,384 GPUs to the
frame with its answer; a million metric points; a line that is appended to a file. Exit code 1: a limit is exceeded.

    PYTHONPATH=tests/workbench:tests python benchmarks/workbench_speed.py [turns]
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUN = ("model.preset=llama3-405b", "cluster.chip=h100", "cluster.nodes=2048", "layout.tensor=8", "layout.pipeline=16",
       "layout.shard=128")  # fmt: skip
TURNS = {
    "layout.zero": ["1", "2", "3"],
    "layout.recompute": ["none", "attention", "full"],
    "layout.schedule": ["1f1b", "interleaved", "zb-h1", "gpipe"],
    "layout.tensor": ["4", "8", "16"],
    "layout.pipeline": ["8", "16"],
    "layout.shard": ["64", "128", "256"],
    "train.global_batch": ["1024", "2048", "4096"],
    "train.seq_len": ["4096", "8192", "16384"],
    "train.microbatch": ["1", "2"],
}
TURN = """(async () => {
  const control = document.getElementById(%s), results = document.getElementById("results"), began = performance.now();
  control.value = %s;
  control.dispatchEvent(new Event("input", { bubbles: true }));
  while (results.dataset.asking) await new Promise((done) => setTimeout(done, 1));
  await new Promise(requestAnimationFrame);
  return performance.now() - began;
})()"""
LIMITS = {
    "control to redraw, 95th percentile, ms": 150,
    "first paint, ms": 1000,
    "page, bytes": 1_000_000,
    "a million points, ms": 300,
    "until a new line is seen, s": 1,
    "of a core while following": 0.02,
}


def controls(browser: Any, served: Any, count: int) -> dict[str, float]:
    """Turn controls at random."""
    source, found = random.Random(1), []
    with served("workbench", *(f"--{key}" for key in RUN)) as bench, browser() as page:
        size = len(bench.request("GET", f"/?token={bench.token}")[1])
        page.viewport(1440, 1000)
        page.open(bench.address)
        page.until("document.querySelectorAll('.chip').length")
        paint = page.until("performance.getEntriesByType('paint').map((each) => each.startTime)[0]")
        for _ in range(count):
            key = source.choice(sorted(TURNS))
            found.append(page.js(TURN % (json.dumps(key), json.dumps(source.choice(TURNS[key])))))
            time.sleep(0.1)  # a person turns no faster
    print(f"{count} turns, median {statistics.median(found):.0f} ms")
    slow = sorted(found)[int(0.95 * count)]
    return dict(zip(LIMITS, (slow, paint, float(size)), strict=False))


def points(browser: Any, served: Any, lines: int = 20) -> dict[str, float]:
    """Draw a long run whole, and append to it."""
    watched = importlib.import_module("test_watch_page")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "long"
        watched.write(run, range(1, 125_001))
        with served("watch", folder) as watch, browser() as page:
            page.viewport(1366, 900)
            page.open(watch.address)
            page.until("document.getElementById('headline').textContent === '1,000,000 points'")
            page.js("delete document.getElementById('results').dataset.milliseconds; 0")
            page.click("[data-action=whole]")
            drawn = float(page.until("document.getElementById('results').dataset.milliseconds"))
            before, began = watched.cpu_seconds(watch.process.pid), time.monotonic()
            for step in range(125_001, 125_001 + lines):
                watched.write(run, range(step, step + 1))
                page.until(f"document.getElementById('headline').textContent.startsWith('{8 * step:,}')")
            took = time.monotonic() - began
            used = watched.cpu_seconds(watch.process.pid) - before
    return dict(zip(list(LIMITS)[3:], (drawn, took / lines, used / took), strict=True))


def main() -> int:
    """Measure, and say what is beyond its limit."""
    browser, served = (
        getattr(importlib.import_module(name), part) for name, part in (("chromium", "browser"), ("served", "served"))
    )
    found = controls(browser, served, int(sys.argv[1]) if len(sys.argv) > 1 else 100) | points(browser, served)
    for name, value in found.items():
        print(f"{name}: {value:.3g} of {LIMITS[name]:g}{'' if value <= LIMITS[name] else ', beyond its limit'}")
    return int(any(value > LIMITS[name] for name, value in found.items()))


if __name__ == "__main__":
    raise SystemExit(main())
