"""Checks the breakdown of every profile in a folder against a slow one that is easy to trust: the file is read with Python's own
JSON reader, times as exact fractions, and every stretch between two moments at which anything changes is asked what was under way.
It shares no code with the package. The tests use the same functions on generated profiles.

    python benchmarks/trace_oracle.py FOLDER
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

Interval = tuple[int, int]
Piece = tuple[int, int, str]
"""Start, end and class."""

DEVICE = {
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "copy",
    "Memcpy": "copy",
    "gpu_memset": "copy",
    "Memset": "copy",
}
CLASSES = ("compute", "communication", "copy")


def nanoseconds(value: Any) -> int:
    """Microseconds, read as a fraction, in nanoseconds: the nearest, of two the even one."""
    return round(Fraction(value) * 1000)


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a file."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    data = json.loads(text, parse_float=Fraction)
    return data if isinstance(data, list) else data["traceEvents"]


def spans(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that took time, with `start` and `end` in nanoseconds."""
    found = []
    for event in events:
        if event.get("ph") == "X":
            start = nanoseconds(event["ts"])
            found.append({**event, "start": start, "end": start + max(nanoseconds(event.get("dur", 0)), 0)})
    return found


def class_of(event: dict[str, Any]) -> str:
    """The class of something on a device, or of an operator on the host; "" for what is neither."""
    category, name = event.get("cat", ""), event["name"]
    arguments = event.get("args") or {}
    if category in DEVICE:
        if DEVICE[category] == "copy":
            return "copy"
        return "communication" if "Collective name" in arguments or name.startswith(("nccl", "rccl")) else "compute"
    if category in ("cpu_op", "Operator", "user_annotation"):
        if name.startswith(("gloo:", "nccl:", "c10d::", "shardwise:message ")) or name == "record_param_comms":
            return "communication"
        if category == "user_annotation" or name.startswith("shardwise:"):  # ranges and labels are no work themselves
            return ""
        return "copy" if name == "aten::copy_" else "compute"
    return ""


def pieces(found: list[dict[str, Any]]) -> list[Piece]:
    """What was under way and when: on devices if there are any, else each operator when it is the latest begun of its thread."""
    device = [event for event in found if event.get("cat") in DEVICE]
    if device:
        return [(event["start"], event["end"], class_of(event)) for event in device]
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in found:
        if class_of(event):
            threads[event.get("pid"), event.get("tid")].append(event)
    result: list[Piece] = []
    for thread in threads.values():
        # Later in this order is further in: a later start, of equal starts the shorter, of equal spans the later in the file.
        thread.sort(key=lambda event: (event["start"], -event["end"]))
        moments = sorted({moment for event in thread for moment in (event["start"], event["end"])})
        waiting, is_open = list(enumerate(thread))[::-1], dict[int, dict[str, Any]]()
        for begin, end in pairwise(moments):
            while waiting and waiting[-1][1]["start"] <= begin:
                number, event = waiting.pop()
                is_open[number] = event
            for number in [number for number, event in is_open.items() if event["end"] <= begin]:
                del is_open[number]
            if is_open:
                result.append((begin, end, class_of(is_open[max(is_open)])))
    return result


def breakdown(parts: list[Piece], windows: list[Interval]) -> dict[str, int]:
    """Account for the windows, which do not overlap, stretch by stretch."""
    changes: list[tuple[int, str, int]] = []
    for start, end, kind in parts:
        if end > start:
            changes += [(start, kind, 1), (end, kind, -1)]
    for start, end in windows:
        if end > start:
            changes += [(start, "window", 1), (end, "window", -1)]
    changes.sort(key=lambda change: change[0])
    names = ("span", *CLASSES, "idle", "exposed_communication")
    result, under_way, before = dict.fromkeys(names, 0), dict.fromkeys((*CLASSES, "window"), 0), 0
    for moment, kind, change in changes:
        length = moment - before
        if under_way["window"]:
            result["span"] += length
            for name in CLASSES:
                result[name] += length if under_way[name] else 0
            result["idle"] += 0 if any(under_way[name] for name in CLASSES) else length
            result["exposed_communication"] += length if under_way["communication"] and not under_way["compute"] else 0
        under_way[kind] += change
        before = moment
    return result


def breakdown_by_sets(parts: list[Piece], windows: list[Interval]) -> dict[str, int]:
    """The same for short times, with every nanosecond an element of a set."""
    inside = {moment for start, end in windows for moment in range(start, end)}
    of = {
        name: {m for start, end, kind in parts if kind == name for m in range(start, end)} & inside for name in CLASSES
    }
    busy = of["compute"] | of["communication"] | of["copy"]
    return {
        "span": len(inside),
        **{name: len(of[name]) for name in CLASSES},
        "idle": len(inside - busy),
        "exposed_communication": len(of["communication"] - of["compute"]),
    }


def whole(parts: list[Piece]) -> list[Interval]:
    """From the first to the last moment of what was under way."""
    some = [(start, end) for start, end, _ in parts]
    return [(min(start for start, _ in some), max(end for _, end in some))] if some else []


def step_windows(found: list[dict[str, Any]], numbers: Iterable[int]) -> list[Interval]:
    """The windows of some profiler steps, by their ranges on the host."""
    names = {f"ProfilerStep#{number}" for number in numbers}
    return [(e["start"], e["end"]) for e in found if e["name"] in names and e.get("cat") == "user_annotation"]


def check(path: Path) -> tuple[int, list[str]]:
    """Compare both accounts of a file: over all events, and over its complete steps. Gives events and differences."""
    from shardwise.trace.reading.read import read_profile
    from shardwise.trace.spans.activity import activity_of
    from shardwise.trace.spans.steps import break_down, select_steps

    profile = read_profile(path)
    activity = activity_of(profile)
    found = spans(load(path))
    parts = pieces(found)
    differences = [*profile.problems]
    if len(found) != len(profile.events):
        differences.append(f"{len(profile.events)} spans instead of {len(found)}")
    chosen = select_steps(activity)
    cases = {"all events": (select_steps(activity, all_events=True), whole(parts))}
    if chosen.steps:
        cases[f"steps {', '.join(map(str, chosen.numbers))}"] = chosen, step_windows(found, chosen.numbers)
    for name, (looked_at, windows) in cases.items():
        ours, right = asdict(break_down(activity, looked_at.windows)), breakdown(parts, windows)
        differences += [
            f"{name}: {key} is {ours[key]} instead of {right[key]}" for key in right if ours[key] != right[key]
        ]
        print(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in right.items()))
    return len(found), differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    files = sorted(path for path in folder.rglob("*") if path.name.endswith((".json", ".json.gz")))
    wrong = 0
    for path in files:
        print(path.relative_to(folder))
        count, differences = check(path)
        print(f"  {count} spans, {'equal' if not differences else 'DIFFERENT'}")
        for difference in differences:
            print(f"    {difference}")
        wrong += bool(differences)
    print(f"{len(files) - wrong} of {len(files)} profiles equal the oracle to the nanosecond")
    return 1 if wrong or not files else 0


if __name__ == "__main__":
    raise SystemExit(main())
