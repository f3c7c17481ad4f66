"""Replicas of a run that are killed, again and again, while the others train on (`layout.sync_elastic`).

    python tests/chaos/replicas.py [--kills 50] [--seed 1] [--steps 4000] [--replicas 4] [--rows 4] [--hidden 32] [--lr 3e-3]
        [--sync-every 10] [--outer average] [--outer-lr 0.7] [--outer-momentum 0.4] [--apart-lr 6e-3] [--warm 1000]
        [--without killed] [--together] [--folder DIR] [--json FILE]

With `--warm`, a run whose replicas add up their gradients trains so many steps first, and the others begin with its weights, as
DiLoCo's paper begins with a pretrained model. Then three runs see the same data: one whose replicas add up their gradients in every
step, one whose replicas speak every `sync_every` steps and nobody disturbs, and one in which so many replicas are killed with
SIGKILL, at drawn moments. It must end by itself; every step must have been recorded once, and no pause between two exchanges may be
as long as a restart of the run; and its validation loss must be within 3% of the synchronous run's. Replicas that train apart may
have a learning rate of their own (`--apart-lr`): each step of theirs is of a batch so many times smaller. `--together` runs the
three at the same time, which needs three times as many cores as replicas. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import math
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


def run_file(options: argparse.Namespace, steps: int) -> str:
    """The file of a run."""
    replicas = options.replicas
    return f"""name = "replicas"
[model]
layers = 2
hidden = {options.hidden}
heads = 2
[layout]
replicate = {replicas}
[train]
steps = {steps}
seq_len = 64
global_batch = {options.rows * replicas}
lr = {options.lr}
device = "cpu"
eval_every = {steps}
eval_sequences = 256
checkpoint_every = {50 * options.sync_every}
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
    """The validation loss at the end of a run; no number where the replica that writes died before it wrote that."""
    return ([math.nan] + [each["eval_loss"] for each in records(folder, "metrics.jsonl") if "eval_loss" in each])[-1]


class Campaign:
    """One of the three runs."""

    def __init__(self, name: str, keys: list[str], options: argparse.Namespace, folder: Path, steps: int = 0) -> None:
        self.name, self.options, self.place = name, options, folder / name.replace(" ", "-")
        self.place.mkdir(parents=True)
        (self.place / "run.toml").write_text(run_file(options, steps or options.steps))
        self.process, self.began, self.kills = start(self.place, *keys), time.monotonic(), 0

    def finish(self) -> None:
        """Disturb it, if that is its part, and wait for its end."""
        options = self.options
        if self.name == "killed":
            pace = 0.9 * options.steps / options.kills
            self.kills = disturb(self.place, self.process, options.kills, options.replicas, options.seed, pace)
        if self.process.wait():
            raise SystemExit("\n".join((self.place / "said").read_text().splitlines()[-20:]))
        self.seconds = time.monotonic() - self.began

    def record(self, plain: float) -> dict[str, Any]:
        """What came of it, beside the loss of gradients in every step."""
        place, steps = self.place, range(1, self.options.steps + 1)
        found = [record["step"] for record in records(place, "metrics.jsonl") if "loss" in record]
        shares = [len(event["added"]) for event in events(place, "exchange")]
        made = dict(run=self.name, loss=evaluation(place), ratio=evaluation(place) / plain, seconds=self.seconds)
        made |= dict(recorded_once=found == list(steps), kills=self.kills, began=1, pause=0.0, members=0.0, fewest=0)
        if shares:
            made["began"] = len({event["era"] for event in events(place, "exchange")})
            made |= dict(pause=max(pauses(place), default=0.0), members=sum(shares) / len(shares), fewest=min(shares))
        made |= dict(left=len(events(place, "left")), joined=len(events(place, "joined")))
        right = made["recorded_once"] and made["began"] == 1 and made["ratio"] <= 1 + BOUND
        return made | dict(holds=right and (self.name != "killed" or self.kills == self.options.kills))


def main() -> int:
    """The campaign; exit code 0 when all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="of a replica in a step")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--apart-lr", type=float, default=0.0, help="of replicas that train apart; 0: the same")
    parser.add_argument("--sync-every", type=int, default=10)
    parser.add_argument("--outer", choices=("average", "nesterov"), default="average")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="nesterov")
    parser.add_argument("--outer-momentum", type=float, default=0.4, help="nesterov")
    parser.add_argument("--warm", type=int, default=0, help="steps with gradients in every step, before all of them")
    parser.add_argument("--without", nargs="*", default=[], choices=("undisturbed", "killed"))
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    layout = dict(sync_every=options.sync_every, outer_optimizer=options.outer, sync_elastic="true")
    if options.outer == "nesterov":
        layout |= dict(outer_lr=options.outer_lr, outer_momentum=options.outer_momentum)
    apart = [f"--layout.{key}={value}" for key, value in layout.items()] + [
        f"--train.lr={options.apart_lr or options.lr}"
    ]
    keys = {"every step": ["--train.restarts=3"], "undisturbed": apart, "killed": [*apart, "--train.restarts=1000"]}
    chosen = {name: own for name, own in keys.items() if name not in options.without}
    if options.warm:
        warm = Campaign("warm", [], options, folder, options.warm)
        warm.finish()
        chosen = {name: [*own, f"--train.weights={warm.place / 'out'}"] for name, own in chosen.items()}
    made: list[Campaign] = []
    if options.together:
        made = [Campaign(name, own, options, folder) for name, own in chosen.items()]
        for each in sorted(made, key=lambda one: one.name != "killed"):
            each.finish()
    else:
        for name, own in chosen.items():
            made.append(Campaign(name, own, options, folder))
            made[-1].finish()
    found = [each.record(evaluation(made[0].place)) for each in made]
    print(
        f"{'run':12} {'loss':>8} {'ratio':>7} {'bound':>6} {'kills':>6} {'left':>5} {'joined':>7} {'members':>8} {'fewest':>7} "
        f"{'longest pause':>14} {'s':>6}  steps recorded once"
    )
    for one in found:
        print(
            f"{one['run']:12} {one['loss']:8.4f} {one['ratio']:7.4f} {1 + BOUND:6.3f} {one['kills']:6} {one['left']:5} "
            f"{one['joined']:7} {one['members']:8.2f} {one['fewest']:7} {one['pause']:12.1f} s {one['seconds']:6.0f}  "
            f"{one['recorded_once']}"
        )
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key not in ("folder", "json")}
        options.json.write_text(json.dumps(dict(settings=settings, runs=found), indent=1))
    good = all(one["holds"] for one in found)
    print("all of it holds" if good else "NOT all of it holds")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
