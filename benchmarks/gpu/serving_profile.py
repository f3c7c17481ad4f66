"""Where the time of the engine's steps goes on a GPU: steady steps of some kinds, timed, and then profiled for the sums of their
kernels and for how long the device had nothing to do.

    python benchmarks/gpu/serving.py llama3-8b --profile FILE [--only "256 sequences, 1024 kept" …]
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.serve.engine import Engine
from shardwise.serve.request import Request, Sampling

TIMED, PROFILED = 24, 6
STEPS: dict[str, tuple[int, int, int, int]] = {
    "256 sequences, 1024 kept": (256, 1024, 0, 0),
    "128 sequences, 1024 kept": (128, 1024, 0, 0),
    "32 sequences, 256 kept": (32, 256, 0, 0),
    "1 sequence, 256 kept": (1, 256, 0, 0),
    "prompts of 2048": (0, 0, 64, 2048),
    "128 sequences and prompts of 512": (128, 512, 320, 512),
}
"""By name: sequences that decode, tokens of each before; prompts that come beside them, and their tokens."""


def settle(engine: Engine) -> None:
    """Let the engine end what it has, and wait for the device."""
    while not engine.idle:
        engine.step()
    torch.cuda.synchronize()


def begin(engine: Engine, sequences: int, kept: int, prompts: int, tokens: int) -> None:
    """Bring an engine to where its next steps are of this kind."""
    sampling = Sampling(0.6)
    for n in range(sequences):
        prompt = tuple((7 * i + n) % engine.vocab for i in range(kept))
        engine.add(Request(f"decoding {n}", prompt, 4 * (TIMED + PROFILED), sampling, ignore_end=True))
    while engine.scheduler.waiting or len(engine.scheduler.decoding) < sequences:
        engine.step()
    for n in range(prompts):
        prompt = tuple((11 * i + n) % engine.vocab for i in range(tokens))
        engine.add(Request(f"prompt {n}", prompt, 1 if not sequences else 8, sampling, ignore_end=True))
    for _ in range(2):
        engine.step()


class Waited:
    """A step's event, which notes how long the host waits for it."""

    seconds = 0.0

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        """As the event does."""
        start = time.perf_counter()
        self.event.synchronize()
        Waited.seconds += time.perf_counter() - start


def timed(engine: Engine, steps: int) -> dict[str, float]:
    """Milliseconds of a step, and of what the host does for it beside waiting; and how many tokens a step computes."""
    torch.cuda.synchronize()
    Waited.seconds = 0.0
    computed, began = engine.computed_tokens, time.perf_counter()
    for _ in range(steps):
        for each in engine.under_way:
            if each.launched.done is not None and not isinstance(each.launched.done, Waited):
                each.launched.done = Waited(each.launched.done)  # type: ignore[assignment]
        engine.step()
    host = time.perf_counter() - began - Waited.seconds
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    tokens = (engine.computed_tokens - computed) / steps
    return {"step_ms": wall / steps * 1e3, "host_ms": host / steps * 1e3, "tokens": tokens}


def device_times(events: Any) -> dict[str, Any]:
    """Of profiled steps: milliseconds of each kernel in all, how long the device was busy, and how long it waited."""
    kernels: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in events:
        if event.device_type.name == "CUDA" and event.time_range.elapsed_us() > 0:
            kernels[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    busy, until, gaps = 0.0, spans[0][0], []
    for start, end in spans:
        if start > until:
            gaps.append(start - until)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    table = sorted(((sum(v) / 1e3, len(v), name[:160]) for name, v in kernels.items()), reverse=True)
    return {
        "busy_ms": busy / 1e3, "idle_ms": sum(gaps) / 1e3, "longest_gaps_us": sorted(gaps, reverse=True)[:16],
        "kernels": [{"ms": ms, "count": count, "name": name} for ms, count, name in table[:28]],
    }  # fmt: skip


def profile_steps(engine: Engine, path: Path, only: list[str]) -> None:
    """Write what each kind of step costs to a file, and say it."""
    rows: dict[str, Any] = {}
    for name, (sequences, kept, prompts, tokens) in STEPS.items():
        if only and name not in only:
            continue
        settle(engine)
        begin(engine, sequences, kept, prompts, tokens)
        steps = TIMED if not prompts else 6
        row: dict[str, Any] = timed(engine, steps)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                engine.step()
            torch.cuda.synchronize()
        row |= device_times(found.events())
        for key in ("busy_ms", "idle_ms"):
            row[key] /= PROFILED
        for kernel in row["kernels"]:
            kernel["ms"] /= PROFILED
        rows[name] = row
        path.write_text(json.dumps(rows, indent=1))
        print(
            f"{name}: {row['step_ms']:.2f} ms, host {row['host_ms']:.2f}, {row['tokens']:.0f} tokens, "
            f"busy {row['busy_ms']:.2f}, idle {row['idle_ms']:.2f}"
        )
        for kernel in row["kernels"][:14]:
            print(f"    {kernel['ms']:8.3f} ms {kernel['count'] / PROFILED:7.1f} x  {kernel['name'][:100]}", flush=True)
    settle(engine)
