"""The fault campaign: runs of several ranks are killed, stopped, told to end, starved of disk and given damaged checkpoints, again
and again, and must end with the losses of a run that nobody disturbed, bit for bit.

    python tests/chaos/campaign.py [--faults 210] [--seed 1] [--folder DIR]

A campaign is a few runs, each with many faults: the agent of the run restarts its ranks by itself, and the campaign starts the
command again only where a fault ends it (told to stop, the command itself killed). What happens is decided ahead, by a seed; the
faults are injected from outside the trainer (`inject/sitecustomize.py`). Crashes while saving are spread over all file
operations of a save, as counted in the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tiny_run import tiny_toml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

RUN = tiny_toml(
    seq_len=16, microbatch=1, keep=3, hang_seconds=4.0, restarts=1000, restart_wait=0.0, compare_every=0
)  # fmt: skip

EVERY = 2

LAYOUTS: dict[str, dict[str, int]] = {
    "2 ranks, shard": {"shard": 2},
    "2 ranks, replicate": {"replicate": 2},
    "2 ranks, pipeline": {"pipeline": 2},
    "4 ranks, shard x tensor": {"shard": 2, "tensor": 2},
    "4 ranks, replicate x shard": {"replicate": 2, "shard": 2},
}

KINDS = {
    "kill": 5,
    "kill at start": 2,
    "tell to stop": 3,
    "halt": 3,
    "crash while saving": 7,
    "crash at start": 2,
    "full disk": 4,
    "flip a bit": 3,
    "truncate": 3,
    "kill the command": 1,
    "kill the fork server": 1,
}
"""Kinds of faults and how often each comes, in parts; a damaged checkpoint is always followed by a kill, so that it is read."""

ENDS_COMMAND = (75, -9)


@dataclass
class Outcome:
    """What became of one run."""

    name: str
    faults: Counter[str]
    same: bool
    starts: int
    restarts: int
    noticed: int
    """Damaged checkpoints that the run found and went behind."""
    unsaved: int
    """Saves that did not come about, and were said."""
    seconds: float


def plan_faults(
    kinds: dict[str, int], count: int, ranks: int, seed: int, operations: dict[int, int]
) -> list[dict[str, Any]]:
    """The faults of a run, in the order they are to happen. `operations` are the file operations of a save, by rank."""
    rng = random.Random(seed)
    bag = [kind for kind, parts in kinds.items() for _ in range(parts)]
    once, more = list(kinds), [bag[n % len(bag)] for n in range(count)]
    rng.shuffle(once)
    rng.shuffle(more)
    wanted = [*once, *more]  # each kind at least once
    where = random.Random(seed + 1)  # of its own, so that the steps do not depend on how many operations there are
    places = {rank: where.sample(range(1, n + 1), n) for rank, n in operations.items()}
    faults: list[dict[str, Any]] = []
    restarted = False

    def add(kind: str, rank: int, step: int) -> None:
        fault = dict(id=len(faults), kind=kind, rank=rank, step=step, delay=rng.random(), seed=rng.randrange(2**32))
        if kind in ("crash while saving", "crash at start", "full disk"):
            # Every operation once before any comes again.
            places[rank] = places[rank] or where.sample(range(1, operations[rank] + 1), operations[rank])
            fault["operation"] = places[rank].pop()
            fault["torn"] = where.random() < 0.5
            if kind == "full disk":
                # Early enough for something to be written after it; 0: the lack of room is seen ahead.
                fault["operation"] = (
                    0 if where.random() < 0.25 else where.randint(1, min(operations[rank], 6 if rank else 15))
                )
        faults.append(fault)

    step = 3
    for kind in wanted:
        if len(faults) >= count:
            break
        # The first rank commits, so half of the crashes while saving are its own.
        rank = 0 if "crash" in kind and rng.random() < 0.5 else rng.randrange(ranks)
        if kind.endswith("at start") and not restarted:
            add("kill", rng.randrange(ranks), step)
        add(kind, rank, step)
        if kind in ("flip a bit", "truncate"):
            add("kill", rank, step)
            faults[-1]["delay"] = 0.0
        restarted = kind not in ("full disk",)
        step += rng.choice((1, 2, 2, 3))
    return faults


def command(folder: Path, layout: dict[str, int], steps: int) -> list[str]:
    """The command of a run."""
    keys = [f"--layout.{axis}={size}" for axis, size in layout.items()] + [f"--train.checkpoint_every={EVERY}"]
    return [sys.executable, "-m", "shardwise", "train", "run.toml", "--out", "out", f"--train.steps={steps}", *keys]


def start(folder: Path, layout: dict[str, int], steps: int) -> subprocess.Popen[str]:
    """Start the command in a folder that holds a plan of faults."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    paths = [str(HERE / "inject"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment |= dict(
        PYTHONPATH=os.pathsep.join(p for p in paths if p), CHAOS_FOLDER=str(folder), OMP_NUM_THREADS="1"
    )
    said = (folder / "said").open("a")
    return subprocess.Popen(
        command(folder, layout, steps), cwd=folder, env=environment, stdout=said, stderr=said, text=True
    )


def prepare(folder: Path, run: str, faults: list[dict[str, Any]], count: bool = False) -> None:
    """A folder for a run and its faults."""
    (folder / "done").mkdir(parents=True)
    (folder / "run.toml").write_text(run)
    plan = dict(faults=faults, count=count, every=EVERY, checkpoints=str(folder / "out" / "checkpoints"))
    (folder / "faults.json").write_text(json.dumps(plan))


def losses(folder: Path) -> list[tuple[Any, ...]]:
    """What must be the same to the bit, step by step."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for r in lines if "loss" in r]


def checksums(folder: Path) -> dict[str, Any]:
    """The checksums of all weights, optimizer states and random generators at the end."""
    last = max((folder / "out" / "checkpoints").glob("step-*"))
    checksums = {}
    for path in sorted(last.glob("rank-*.safetensors")):
        with safe_open(path, framework="np") as f:
            checksums[path.name] = json.loads(f.metadata()["shards"])
    return checksums


def undisturbed(folder: Path, run: str, layout: dict[str, int], steps: int) -> dict[int, int]:
    """Run without faults; gives the file operations of a save by rank, those of the save with the most."""
    prepare(folder, run, [], count=True)
    process = start(folder, layout, steps)
    if process.wait() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{(folder / 'said').read_text()}")
    counted = {}
    for path in folder.glob("operations-*"):
        sizes = [0]
        for line in path.read_text().splitlines():
            name, _, where = line.partition(" ")
            sizes = [*sizes, 0] if name == "mkdir" and where.endswith(".partial") else sizes
            sizes[-1] += 1
        counted[int(path.name.partition("-")[2])] = max(sizes)
    return counted


def disturbed(
    folder: Path, run: str, layout: dict[str, int], steps: int, faults: list[dict[str, Any]], quiet: bool
) -> tuple[int, float]:
    """Run with faults, starting the command again whenever a fault has ended it; gives how often it was started."""
    prepare(folder, run, faults)
    began, starts, told = time.monotonic(), 0, 0.0
    while True:
        process = start(folder, layout, steps)
        starts += 1
        while process.poll() is None:
            time.sleep(0.05)
            if not quiet and time.monotonic() - told > 15:
                told = time.monotonic()
                done = len(list((folder / "done").iterdir()))
                print(f"  {done} of {len(faults)} faults, {told - began:.0f} s", flush=True)
        code = process.returncode
        if code == 0:
            return starts, time.monotonic() - began
        in_use = code == 2 and "is in use by another run" in (folder / "said").read_text().splitlines()[-1]
        if code not in ENDS_COMMAND and not in_use:
            raise SystemExit(
                f"{folder}: exit code {code}\n" + "\n".join((folder / "said").read_text().splitlines()[-20:])
            )
        if in_use:  # ranks whose command was killed take a moment to end
            time.sleep(0.2)


def campaign_run(
    folder: Path, name: str, count: int, seed: int, kinds: dict[str, int], quiet: bool = False, run: str = RUN
) -> Outcome:
    """One run undisturbed, and again with `count` faults."""
    layout = LAYOUTS[name]
    ranks = 1
    for size in layout.values():
        ranks *= size
    draft = plan_faults(kinds, count, ranks, seed, dict.fromkeys(range(ranks), 1))
    steps = max(fault["step"] for fault in draft) + 16  # faults that must wait for each other come late
    operations = undisturbed(folder / "undisturbed", run, layout, steps)
    faults = plan_faults(kinds, count, ranks, seed, operations)
    if not quiet:
        print(
            f"{name}: {len(faults)} faults over {steps} steps; file operations of a save by rank: {operations}",
            flush=True,
        )
    starts, seconds = disturbed(folder / "disturbed", run, layout, steps, faults, quiet)
    a, b = folder / "undisturbed", folder / "disturbed"
    done = {int(path.name) for path in (b / "done").iterdir()}
    said = (b / "said").read_text()
    events = [json.loads(line) for line in (b / "out" / "events.jsonl").read_text().splitlines()]
    return Outcome(
        name=name,
        faults=Counter(fault["kind"] for fault in faults if fault["id"] in done),
        same=losses(a) == losses(b) and checksums(a) == checksums(b) and len(losses(b)) == steps,
        starts=starts,
        restarts=sum(event["what"] == "begin" and bool(event.get("restart")) for event in events),
        noticed=said.count("is set aside as"),
        unsaved=said.count("is not saved"),
        seconds=seconds,
    )


def main() -> int:
    """The whole campaign; exit code 0 when every run ended as it would have undisturbed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=210)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: a temporary folder)")
    args = parser.parse_args()
    # Restarts of four ranks take twice as long as those of two, so these have fewer.
    shares = {name: 3 if "4" in name else 5 for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = []
        for n, (name, share) in enumerate(shares.items()):
            count = -(-args.faults * share // sum(shares.values()))
            folder = (args.folder or Path(temporary)) / f"run-{n}"
            outcome = campaign_run(folder, name, count, args.seed * 1000 + n, KINDS)
            print(
                f"  {'the same, bit for bit' if outcome.same else 'NOT THE SAME'}; {outcome.seconds:.0f} s", flush=True
            )
            outcomes.append(outcome)
    report(outcomes)
    enough = sum(sum(o.faults.values()) for o in outcomes) >= args.faults
    return 0 if enough and all(o.same for o in outcomes) else 1


def report(outcomes: list[Outcome]) -> None:
    """The table of the campaign."""
    width = max(len(o.name) for o in outcomes)
    heads = ["faults", "restarts", "commands", "damage noticed", "saves missed", "seconds", "result"]
    print("\n" + " " * width + "  " + "  ".join(f"{h:>14}" for h in heads))
    for o in outcomes:
        cells = [sum(o.faults.values()), o.restarts, o.starts, o.noticed, o.unsaved, round(o.seconds)]
        print(f"{o.name:<{width}}  " + "  ".join(f"{c:>14}" for c in [*cells, "same" if o.same else "DIFFERS"]))
    total = sum((o.faults for o in outcomes), Counter())
    print("\nfaults by kind: " + ", ".join(f"{kind} {total[kind]}" for kind in KINDS))
    lost = sum(not o.same for o in outcomes)
    print(f"{sum(total.values())} faults in {len(outcomes)} runs; runs lost or different: {lost}")


if __name__ == "__main__":
    sys.exit(main())
