"""Replicas of a run that are killed, again and again, while the others train on (`layout.sync_elastic`).

    python tests/chaos/replicas.py [--kills 50] [--seed 1] [--steps 4000] [--replicas 4] [--folder DIR]

Three runs see the same data: one whose replicas add up their gradients in every step, one whose replicas speak every
`sync_every` steps and nobody disturbs, and one in which so many replicas are killed with SIGKILL, at drawn moments. It must end
by itself; every step must have been recorded once, and no pause between two exchanges may be as long as a restart of the run; and
its validation loss must be within 3% of the synchronous run's. Prints what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BOUND = 0.03
EVERY = 10


def start(folder: Path, *keys: str) -> subprocess.Popen[str]:
    """The command of a run, in a folder that holds its file."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "SHARDWISE_REPLICA")}
    environment |= dict(PYTHONPATH=os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]), OMP_NUM_THREADS="1")
    with (folder / "said").open("a") as said:
        command = [sys.executable, "-m", "shardwise", "train", "run.toml", "--out", "out", *keys]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, text=True)


def heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    """What the ranks of a run wrote last, by rank."""
    found = {}
    for path in (folder / "out" / "logs").glob("rank-*.beat"):
        try:
            beat = json.loads(path.read_text())
            found[beat["rank"]] = beat
        except (ValueError, OSError):  # just being written, or removed
            continue
    return found


def kill(folder: Path, rank: int, number: signal.Signals = signal.SIGKILL) -> int | None:
    """Kill a rank that trains; returns the step it was at, None where it does not."""
    beat = heartbeats(folder).get(rank)
    if beat is None or not beat["step"]:
        return None
    try:
        os.kill(beat["process"], number)
    except ProcessLookupError:
        return None
    return beat["step"]


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of a file of a run's folder."""
    path = folder / "out" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(folder: Path, what: str) -> list[dict[str, Any]]:
    """What was recorded of this kind."""
    return [event for event in records(folder, "events.jsonl") if event["what"] == what]


def until(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    """Wait for something while a command runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"it did not come; the command's code is {process.poll()}")
        time.sleep(0.02)


def pauses(folder: Path) -> Iterator[float]:
    """Seconds between the exchanges of a run."""
    times = [event["time"] for event in events(folder, "exchange")]
    yield from (later - earlier for earlier, later in pairwise(times))


def run_file(steps: int, replicas: int) -> str:
    """The file of all three runs."""
    return f"""name = "replicas"
[model]
layers = 2
hidden = 32
heads = 2
[layout]
replicate = {replicas}
[train]
steps = {steps}
seq_len = 64
global_batch = {4 * replicas}
lr = 3e-3
device = "cpu"
eval_every = {steps}
eval_sequences = 256
checkpoint_every = {50 * EVERY}
restart_wait = 0.0
hang_seconds = 20.0
compare_every = 0
"""


def members_of(folder: Path, replicas: int) -> list[int]:
    """The members of a run as the last event has them."""
    changes = [event for event in records(folder, "events.jsonl") if "members" in event]
    return changes[-1]["members"] if changes else list(range(replicas))


def disturb(folder: Path, process: subprocess.Popen[str], kills: int, replicas: int, seed: int, pace: float) -> int:
    """Kill replicas at drawn moments, spread over the run, and never the last member; returns how many."""
    draw, done = random.Random(seed), 0
    while process.poll() is None and done < kills:
        time.sleep(0.1 * draw.random())
        trained = max((beat["step"] for beat in heartbeats(folder).values()), default=0)
        members, victim = members_of(folder, replicas), draw.randrange(replicas)
        if trained < (done + 1) * pace or len(members) < 2:
            continue
        left = len(events(folder, "left"))
        if kill(folder, victim) is None:
            continue
        done += 1
        # The next one is drawn from those that are known to be there.
        while victim in members and len(events(folder, "left")) == left and process.poll() is None:
            time.sleep(0.02)
    return done


def evaluation(folder: Path) -> float:
    """The validation loss at the end of a run."""
    return [record["eval_loss"] for record in records(folder, "metrics.jsonl") if "eval_loss" in record][-1]


def main() -> int:
    """The campaign; exit code 0 when all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    apart = [f"--layout.sync_every={EVERY}", "--layout.outer_momentum=0.4", "--layout.sync_elastic=true"]
    runs = {"every step": ["--train.restarts=3"], "undisturbed": apart, "killed": [*apart, "--train.restarts=1000"]}
    good = True
    for name, keys in runs.items():
        place = folder / name.replace(" ", "-")
        place.mkdir(parents=True)
        (place / "run.toml").write_text(run_file(options.steps, options.replicas))
        process, began = start(place, *keys), time.monotonic()
        kills = 0
        if name == "killed":
            pace = 0.9 * options.steps / options.kills
            kills = disturb(place, process, options.kills, options.replicas, options.seed, pace)
        code = process.wait()
        if code:
            print("\n".join((place / "said").read_text().splitlines()[-20:]))
            return code
        steps = [record["step"] for record in records(place, "metrics.jsonl") if "loss" in record]
        once = steps == list(range(1, options.steps + 1))
        ratio = evaluation(place) / evaluation(folder / "every-step")
        good = good and once and ratio <= 1 + BOUND
        print(
            f"{name}: loss {evaluation(place):.4f}, {ratio:.4f} of that with gradients in every step; "
            f"{time.monotonic() - began:.0f} s; every step recorded once: {once}"
        )
        if name == "killed":
            left, joined = events(place, "left"), events(place, "joined")
            short = [len(event["added"]) for event in events(place, "exchange")]
            eras = {event["era"] for event in events(place, "exchange")}
            good = good and kills == options.kills and len(eras) == 1
            print(
                f"{kills} kills: {len(left)} times a replica left, {len(joined)} times one joined; in the mean "
                f"{sum(short) / len(short):.2f} replicas in an exchange, at least {min(short)}; the run began {len(eras)} time; "
                f"longest pause between two exchanges {max(pauses(place)):.1f} s, undisturbed "
                f"{max(pauses(folder / 'undisturbed')):.1f} s"
            )
    print("all of it holds" if good else "NOT all of it holds")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
