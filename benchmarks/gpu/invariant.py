"""What batch invariance costs: steps of one GPU with made-up weights, with `serve.invariant` and without. Decoding steps of some
sequences that keep some tokens, and steps of 8192 tokens of prompts.

python benchmarks/gpu/invariant.py [llama3-8b] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from shardwise.measure.serve_load import random_model
from shardwise.model.invariant.network import make_invariant
from shardwise.run import read_run
from shardwise.serve.runner import Row, Runner

DECODING = [(count, kept) for count in (1, 32, 256) for kept in (512, 1500)]
PROMPTS = [(8, 1024), (1, 8192)]
PAGE, LONGEST = 64, 8192
REPEATS = 5


def seconds_of(runner: Runner, rows: list[Row], steps: int) -> float:
    """Of one step, launched one after the other; the median of some rounds."""
    for _ in range(2):
        runner.launch(rows)
    took = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            runner.launch(rows)
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) / steps / 1e3)
    return statistics.median(took)


def measure(model: Any) -> dict[str, float]:
    """Seconds of each step, by its name."""
    sequences = max(count for count, _ in DECODING)
    each = -(-(max(kept for _, kept in DECODING) + 64) // PAGE)
    most = max(sequences * each, max(count * -(-length // PAGE) for count, length in PROMPTS))
    runner = Runner(model, most + 1, PAGE, sequences, LONGEST, torch.bfloat16)
    found = {}
    runner.set_pages([(s + 1, n, 1 + s * each + n) for s in range(sequences) for n in range(each)])
    for count, kept in DECODING:
        rows = [Row(s + 1, kept, None, 1, 1) for s in range(count)]
        found[f"{count} sequences, {kept} tokens kept"] = seconds_of(runner, rows, 10)
    for count, length in PROMPTS:
        pages = -(-length // PAGE)
        runner.set_pages([(s + 1, n, 1 + s * pages + n) for s in range(count) for n in range(pages)])
        rows = [Row(s + 1, 0, [7] * length, length, 1) for s in range(count)]
        found[f"prompts of {count} x {length} tokens"] = seconds_of(runner, rows, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset", nargs="?", default="llama3-8b")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run = read_run(None, [f"model.preset={args.preset}", f"model.max_positions={LONGEST}", "train.dtype=bfloat16"])
    model = random_model(run)
    plain = measure(model)
    make_invariant(model)
    invariant = measure(model)
    rows = {name: (plain[name] * 1e3, invariant[name] * 1e3, invariant[name] / plain[name]) for name in plain}
    for name, (before, after, ratio) in rows.items():
        print(f"{name:36} {before:8.2f} ms {after:8.2f} ms {ratio:6.2f}")
    if args.out:
        args.out.write_text(
            json.dumps({"preset": args.preset, "device": torch.cuda.get_device_name(), "ms": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
