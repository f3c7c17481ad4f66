"""A ladder of five small runs beside the run it predicts: `python benchmarks/ladder.py --out DIR` writes the rungs of
examples/ladder.toml with `shardwise scale ladder` and trains each on two cores of its own, side by side where there are more. The
target trains on a GPU, or on the cores that are left; where none are, after the rungs. Prints the prediction, what the target
reached, and the seconds that the rungs take one after another on two cores. Exits with 1 where the prediction is off by more than
2% or they take more than half an hour."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
MOST_SECONDS, MOST_OFF = 1800.0, 0.02


def shardwise(words: list[str], cores: set[int] | None = None) -> str:
    """Run the command, on some cores without a GPU where they are given; returns what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if cores is not None:
        environment |= {"OMP_NUM_THREADS": str(len(cores)), "CUDA_VISIBLE_DEVICES": ""}
        words = [*words, "--train.dtype=float32"]
    command = [sys.executable, "-m", "shardwise", *words]
    if cores is not None:
        command = ["taskset", "-c", ",".join(map(str, sorted(cores))), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr[-2000:] or done.stdout[-2000:])
    return done.stdout


def last_loss(folder: Path) -> float:
    """The evaluation at the end of a run."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return float([record["eval_loss"] for record in records if "eval_loss" in record][-1])


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "examples" / "ladder.toml")
    parser.add_argument("--budget", default="0.25")
    parser.add_argument("--out", type=Path, default=Path("runs/ladder"))
    args, overrides = parser.parse_known_args()
    ladder = ["scale", "ladder", str(args.run), "--budget", args.budget, "--out", str(args.out), "--json", *overrides]
    rungs = json.loads(shardwise(ladder))["rungs"]
    cores = sorted(os.sched_getaffinity(0))
    pairs = [set(cores[at : at + 2]) for at in range(0, len(cores) - 1, 2)]
    free = pairs[: max(1, min(len(rungs), len(pairs) - 1))]
    rest = set(cores) - set().union(*free)
    on_gpu = torch.cuda.is_available()

    def train(rung: dict[str, Any]) -> float:
        mine, began = free.pop(), time.monotonic()
        shardwise(["train", rung["file"], "--out", str(args.out / rung["name"])], mine)
        free.append(mine)
        return time.monotonic() - began

    def target() -> None:
        words = ["train", str(args.run), "--out", str(args.out / "target"), *overrides]
        shardwise([*words, "--train.dtype=float32"]) if on_gpu else shardwise(words, rest or set(cores))

    with ThreadPoolExecutor(len(free)) as pool, ThreadPoolExecutor(1) as aside:
        beside = aside.submit(target) if on_gpu or rest else None
        taken = list(pool.map(train, reversed(rungs)))
        target() if beside is None else beside.result()
    found = json.loads(shardwise(ladder))
    said, reached = found["prediction"], last_loss(args.out / "target")
    off = said["loss"] / reached - 1
    figures = [dict(params=rung["params"], tokens=rung["tokens"], loss=rung["loss"]) for rung in found["rungs"]]
    times = found["target"]["params"] / figures[-1]["params"]
    print(
        json.dumps(
            dict(rungs=figures, target=found["target"], times_larger=times, predicted=said, reached=reached, off=off,
                 seconds=sum(taken), seconds_each=taken[::-1]), indent=1,
        )
    )  # fmt: skip
    sys.exit(0 if abs(off) <= MOST_OFF and sum(taken) <= MOST_SECONDS and times >= 3 else 1)


if __name__ == "__main__":
    main()
