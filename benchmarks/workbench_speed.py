"""How soon the workbench shows the answer to a turned control, for a run of Llama 3 405B on 16,384 GPUs: from the event to the
frame, as the page sees it, in headless Chromium. `PYTHONPATH=tests/workbench python benchmarks/workbench_speed.py [turns]`."""

from __future__ import annotations

import importlib
import json
import random
import statistics
import sys
import time

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


def main() -> None:
    """Turn controls at random and print how long it took."""
    browser, served = (
        getattr(importlib.import_module(name), part) for name, part in (("chromium", "browser"), ("served", "served"))
    )
    count, source, found = int(sys.argv[1]) if len(sys.argv) > 1 else 100, random.Random(1), []
    with served("workbench", *(f"--{key}" for key in RUN)) as bench, browser() as page:
        page.viewport(1440, 1000)
        page.open(bench.address)
        page.until("document.querySelectorAll('.chip').length")
        paint = page.until("performance.getEntriesByType('paint').map((each) => each.startTime)[0]")
        for _ in range(count):
            key = source.choice(sorted(TURNS))
            found.append(page.js(TURN % (json.dumps(key), json.dumps(source.choice(TURNS[key])))))
            time.sleep(0.1)  # a person turns no faster
    slow = sorted(found)[int(0.95 * count)]
    print(
        f"{count} turns: median {statistics.median(found):.0f} ms, 95th percentile {slow:.0f} ms; first paint {paint:.0f} ms"
    )


if __name__ == "__main__":
    main()
