"""How fast profiles are read and broken down, beside HolisticTraceAnalysis, and in how much memory. Each is measured in fresh
processes that take turns, so that a busy spell of the machine falls on both; the clock runs from the files to the finished
breakdown, without imports. Memory is the most that a process and its children held together. Ratios are medians of those of
each round. (HolisticTraceAnalysis 0.5.0 needs pandas 2: with pandas 3 it fails on columns it has made narrow.)

    python -m venv hta && hta/bin/pip install HolisticTraceAnalysis==0.5.0 'pandas<3'
    python benchmarks/trace_speed.py --hta-python hta/bin/python [--events 1000000] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trace_made import write

REQUIRED = {"one file": 10.0, "one file, cached": 50.0, "8 ranks": 10.0}
"""Times faster than HolisticTraceAnalysis."""
REQUIRED_MEMORY = 0.5
"""Of what HolisticTraceAnalysis holds, for one file."""
LARGEST_GIB = 24.0
"""For 64 ranks."""

HTA = """
import json, logging, sys, time
from pathlib import Path
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
folder = Path(sys.argv[1])
files = {int(path.name.split("-")[1].split(".")[0]): path.name for path in folder.glob("*.json.gz")}
begun = time.perf_counter()
table = TraceAnalysis(trace_files=files, trace_dir=str(folder)).get_temporal_breakdown(visualize=False)
print("RESULT", json.dumps({"seconds": time.perf_counter() - begun, "ranks": len(table)}))
"""


def measure(folder: Path, cache: Path | None) -> dict[str, float]:
    """Ours: read all profiles of a folder and break their time down."""
    from shardwise.trace.reading.read import open_profiles
    from shardwise.trace.spans.activity import activity_of
    from shardwise.trace.spans.steps import break_down, select_steps

    begun = time.perf_counter()
    opened = open_profiles([folder], cache)
    breakdowns = []
    for profile in opened.profiles:
        activity = activity_of(profile)
        breakdowns.append(break_down(activity, select_steps(activity).windows))
    seconds = time.perf_counter() - begun
    assert not opened.problems, opened.problems
    return {"seconds": seconds, "ranks": len(breakdowns)}


def in_fresh_process(command: list[str]) -> dict[str, float]:
    """Run a contestant; its result, with the most memory in bytes that it and its children held."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    most = 0
    while process.poll() is None:
        most = max(most, resident(process.pid))
        time.sleep(0.02)
    out, err = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        raise SystemExit(f"{command[:3]} failed:\n{err[-2000:]}")
    return {**json.loads(lines[-1].removeprefix("RESULT ")), "bytes": most}


def resident(pid: int) -> int:
    """Bytes in memory of a process and its children."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident, children))


def ours(folder: Path, cache: Path | None = None) -> list[str]:
    return [sys.executable, __file__, "--measure", str(folder), *(["--cache", str(cache)] if cache else [])]


def make(folder: Path, ranks: int, events: int) -> Path:
    """Profiles of some ranks, if they are not there yet."""
    for rank in range(ranks):
        path = folder / f"rank-{rank}.json.gz"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write(path, events, rank, ranks)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hta-python", help="the Python that has HolisticTraceAnalysis 0.5.0; without it, ours alone is timed"
    )
    parser.add_argument(
        "--events", type=int, default=1_000_000, help="in the one large file; ranks have an eighth each"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, default=64, help="ranks of the largest job (default: 64)")
    parser.add_argument("--folder", type=Path, help="keeps the profiles made, for the next time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print("RESULT", json.dumps(measure(args.measure, args.cache)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        place = args.folder or Path(name)
        results = compare(place, Path(name), args)
    print(json.dumps(results) if args.json else report(results))
    return 1 if failures(results) else 0


def compare(place: Path, scratch: Path, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds and bytes of every contestant, by round."""
    one = make(place / "one", 1, args.events)
    eight = make(place / "eight", 8, args.events // 8)
    many = make(place / "many", args.many, args.events // 8)
    cache = scratch / "cache"
    contestants = {"one file": ours(one), "one file, cached": ours(one, cache), "8 ranks": ours(eight),
                   "8 ranks, cached": ours(eight, cache)}  # fmt: skip
    if args.hta_python:
        peers = {"HTA, one file": one, "HTA, 8 ranks": eight}
        contestants |= {name: [args.hta_python, "-c", HTA, str(folder)] for name, folder in peers.items()}
    for folder in (one, eight):
        in_fresh_process(ours(folder, cache))  # fills the cache
    results: dict[str, dict[str, list[float]]] = {}
    rounds = [(name, command) for _ in range(args.rounds) for name, command in contestants.items()]
    for name, command in [*rounds, (f"{args.many} ranks, a large job", ours(many))]:
        measured = in_fresh_process(command)
        row = results.setdefault(name, {"seconds": [], "bytes": []})
        row["seconds"].append(measured["seconds"])
        row["bytes"].append(measured["bytes"])
        print(f"{name}: {measured['seconds']:.2f} s, {measured['bytes'] / 2**20:.0f} MiB", file=sys.stderr, flush=True)
    shutil.rmtree(cache, ignore_errors=True)
    return results


def ratios(results: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """How many times faster than the peer, medians over the rounds."""
    found = {}
    for name in ("one file", "one file, cached", "8 ranks", "8 ranks, cached"):
        peer = results.get(f"HTA, {name.removesuffix(', cached')}")
        if peer:
            pairs = zip(peer["seconds"], results[name]["seconds"], strict=True)
            found[name] = statistics.median(theirs / mine for theirs, mine in pairs)
    return found


def failures(results: dict[str, dict[str, list[float]]]) -> list[str]:
    """What falls short of what is required."""
    found = ratios(results)
    short = [
        f"{name}: {found[name]:.1f} times faster, not {least}"
        for name, least in REQUIRED.items()
        if found.get(name, least) < least
    ]
    peer = results.get("HTA, one file")
    if peer and statistics.median(results["one file"]["bytes"]) > REQUIRED_MEMORY * statistics.median(peer["bytes"]):
        short.append("one file: too much memory")
    return short + [
        f"{name}: more than {LARGEST_GIB} GiB"
        for name, row in results.items()
        if max(row["bytes"]) > LARGEST_GIB * 2**30 and "HTA" not in name
    ]


def report(results: dict[str, dict[str, list[float]]]) -> str:
    """A table for people."""
    found = ratios(results)
    lines = [f"{'':<18} {'seconds':>8} {'MiB':>7}  times faster"]
    for name, row in results.items():
        seconds, size = statistics.median(row["seconds"]), statistics.median(row["bytes"]) / 2**20
        lines.append(f"{name:<18} {seconds:>8.2f} {size:>7.0f}  {f'{found[name]:.1f}' if name in found else ''}")
    return "\n".join([*lines, *failures(results)])


if __name__ == "__main__":
    raise SystemExit(main())
