"""Stops at random moments: a run is told to stop by a signal, from its first millisecond to its last save, and must end within
seconds, with one sentence and the exit code of a stop; started again, it must end with the losses of a run that nobody stopped,
bit for bit.

    python tests/chaos/stops.py [--stops 200] [--seed 1] [--at-once 2] [--folder DIR]

Python itself needs some 20 ms before a handler can be set. A signal in that time ends the process as it ends any Python program;
these are counted apart.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from campaign import ROOT, RUN, losses

STEPS = 60
SECONDS = 10.0
"""Within which a stopped run has ended."""
PYTHON_STARTS = 0.15
"""Seconds after which Python has come to this package on any machine."""
LAYOUTS = {1: [], 2: ["--layout.shard=2"], 4: ["--layout.shard=2", "--layout.tensor=2"]}
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Stop:
    """One signal: when, which, to whom."""

    ranks: int
    moment: float
    """Of the time that an undisturbed run takes."""
    number: signal.Signals
    group: bool
    """To the whole process group, as a terminal does, or to the command alone."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    stop: Stop
    code: int
    seconds: float
    said: str
    wrong: str
    """Empty when all was as it should be."""


def draw(count: int, seed: int) -> list[Stop]:
    """Stops at moments spread evenly over a run, in the order of a seed."""
    rng = random.Random(seed)
    stops = [
        Stop(rng.choice(list(LAYOUTS)), (n + rng.random()) / count, rng.choice(SIGNALS), rng.random() < 0.5)
        for n in range(count)
    ]
    rng.shuffle(stops)
    return stops


def start(folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Start the command in a folder of its own, as the leader of a process group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(RUN)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= dict(PYTHONPATH=os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]), OMP_NUM_THREADS="1")
    keys = [f"--train.steps={STEPS}", "--train.checkpoint_every=7", "--train.hang_seconds=60", *LAYOUTS[ranks]]
    command = [sys.executable, "-m", "shardwise", "train", "run.toml", "--out", "out", *keys]
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, process_group=0)


def undisturbed(folder: Path, ranks: int) -> float:
    """Run to the end; gives the seconds it took."""
    began = time.monotonic()
    code = start(folder, ranks).wait()
    assert code == 0, (folder / "said").read_text()
    return time.monotonic() - began


def stopped(folder: Path, stop: Stop, takes: float, whole: Path) -> Outcome:
    """Run, stop, look, go on, compare."""
    delay = stop.moment * takes
    process = start(folder, stop.ranks)
    began = time.monotonic()
    try:
        code = process.wait(delay)
    except subprocess.TimeoutExpired:
        if stop.group:
            os.killpg(process.pid, stop.number)
        else:
            process.send_signal(stop.number)
        began = time.monotonic()
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = -int(signal.SIGKILL)
    seconds, said = time.monotonic() - began, (folder / "said").read_text()
    early = delay < PYTHON_STARTS and code in (-stop.number, 1, 130)
    sentences = [line for line in said.splitlines() if line.startswith("stop requested")]
    wrong = ""
    if code == -signal.SIGKILL:
        wrong = f"it had not ended after {SECONDS:g} s"
    elif "Traceback" in said and not early:
        wrong = "a traceback"
    elif code not in (0, 75) and not early:
        wrong = f"exit code {code}"
    elif code == 75 and len(sentences) != 1:
        wrong = f"{len(sentences)} sentences"
    if not wrong:
        again = start(folder, stop.ranks)
        if again.wait(300) != 0:
            wrong = f"it did not go on: exit code {again.returncode}"
        elif losses(folder) != losses(whole):
            wrong = "another curve"
    return Outcome(stop, code, seconds, said, wrong)


def campaign(folder: Path, count: int, seed: int, at_once: int) -> list[Outcome]:
    """All stops, some at a time."""
    takes = {ranks: undisturbed(folder / f"whole-{ranks}", ranks) for ranks in LAYOUTS}

    def one(numbered: tuple[int, Stop]) -> Outcome:
        number, stop = numbered
        whole = folder / f"whole-{stop.ranks}"
        outcome = stopped(folder / f"stop-{number}", stop, takes[stop.ranks], whole)
        how = f"{outcome.wrong}\n{outcome.said}" if outcome.wrong else "as it should"
        print(f"{number}: {stop}: exit code {outcome.code} after {outcome.seconds:.1f} s, {how}", flush=True)
        return outcome

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, enumerate(draw(count, seed))))


def main() -> int:
    """The whole campaign; exit code 0 when every run ended as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = campaign(args.folder or Path(temporary), args.stops, args.seed, args.at_once)
    codes = Counter(outcome.code for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    slowest = max(outcome.seconds for outcome in outcomes if outcome.code)
    print(
        f"{len(outcomes)} stops, {len(wrong)} wrong; exit codes {dict(codes)}; the slowest took {slowest:.1f} s to end"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
