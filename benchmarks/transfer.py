"""Does the best learning rate move with the width? Short runs at some widths over a grid of learning rates, with muP and with the
standard parametrization: the loss of each, and by how many steps of the grid the best moves. `python benchmarks/transfer.py
--widths 128,1024` takes some four minutes on a GPU. It exits with 1 where muP's best moves by more than one step, or the standard
one's by no more than muP's."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace

import numpy as np

from shardwise.data.open import open_data
from shardwise.measure.coordinates import of_width
from shardwise.run import Run, run_from_dict
from shardwise.train.step import TrainState


def base(parametrization: str, width: int, args: argparse.Namespace) -> Run:
    """The run at the narrowest width."""
    model = dict(layers=args.layers, hidden=width, heads=width // 32, ffn=4 * width)
    train = dict(
        steps=args.steps, global_batch=args.batch, seq_len=args.seq_len, schedule="linear", warmup=args.steps // 10, final_lr=0.0,
        weight_decay=0.0, parametrization=parametrization, base_width=width, optimizer=args.optimizer, dtype=args.dtype,
        compile=False, cuda_graph=False,
    )  # fmt: skip
    return run_from_dict(dict(model=model, train=train))


def final_loss(run: Run, lr: float, seed: int) -> float:
    """The mean loss of the last tenth of the steps; infinite where training diverged."""
    run = replace(run, train=replace(run.train, lr=lr, muon_lr=lr * 10, seed=seed))
    state, data = TrainState(run), open_data(run)
    size, steps = run.train.global_batch, run.train.steps
    losses = []
    for step in range(steps):
        result = state.train_step(data.train.take(np.arange(step * size, (step + 1) * size)))
        if step >= steps - max(1, steps // 10):
            losses.append(result.loss.item())
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def main() -> None:
    """Sweep and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="128,1024")
    parser.add_argument("--grid", default="-13,-12,-11,-10,-9,-8,-7,-6,-5", help="powers of two of the learning rate")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2, help="to take the mean of")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    widths, grid = ([int(value) for value in text.split(",")] for text in (args.widths, args.grid))
    found: dict[str, dict[str, object]] = {}
    moved: dict[str, int] = {}
    for parametrization in ("mup", "standard"):
        narrow = base(parametrization, widths[0], args)
        best = []
        losses = {}
        for width in widths:
            losses[width] = [
                sum(final_loss(of_width(narrow, width), 2.0**power, seed) for seed in range(args.seeds)) / args.seeds
                for power in grid
            ]
            best.append(grid[int(np.argmin(losses[width]))])
            print(f"{parametrization} {width}: {' '.join(f'{loss:.4f}' for loss in losses[width])}", file=sys.stderr)
        moved[parametrization] = max(best) - min(best)
        found[parametrization] = dict(best=best, moved=moved[parametrization], losses=losses)
    print(json.dumps(dict(grid=grid, widths=widths) | found))
    sys.exit(0 if moved["mup"] <= 1 < moved["standard"] else 1)


if __name__ == "__main__":
    main()
