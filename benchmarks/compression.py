"""What compressed gradients and rarely speaking replicas cost in learning: validation loss beside the uncompressed run's.

A model smaller than the demo's (2 layers of 64, sequences of 128) learns the demo's data, the text that ships with Python, by
AdamW. All methods see the same tokens in the same order, from the same initial weights; each is run for some seeds. Replicas are
real ranks over gloo, started once, with a thread each. What is printed is the loss on held-out sequences behind the last step, its
ratio to the uncompressed run's of the same seed, and how many times fewer bytes the plan says that a rank sends to other replicas.

    python benchmarks/compression.py [--steps 300] [--replicas 4] [--seeds 0 1 2] [--methods none int8] [--out FILE] [--svg FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from shardwise.plan.trainer.traffic import traffic
from shardwise.report.colors import AXIS
from shardwise.report.plot import Plot, Series, svg
from shardwise.run import LayoutConfig, Run, run_from_dict
from shardwise.train.source import TokenSource
from shardwise.train.step import TrainState

METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "none": ({}, 0.0),
    "int8": (dict(compress="int8"), 0.01),
    "fp8": (dict(compress="fp8"), 0.01),
    "int4": (dict(compress="int4"), 0.02),
    "powersgd 4": (dict(compress="powersgd", compress_rank=4, compress_warmup=0.2), 0.01),
    "onebit": (dict(compress="onebit", compress_warmup=0.2), 0.01),
    "powersgd 4, at once": (dict(compress="powersgd", compress_rank=4), 0.01),
    "topk 1%, at once": (dict(compress="topk", compress_density=0.01), 0.03),
    "topk 1%": (dict(compress="topk", compress_density=0.01, compress_warmup=0.2), 0.03),
    "topk 1%, momentum 0.9": (
        dict(compress="topk", compress_density=0.01, compress_momentum=0.9, compress_warmup=0.2),
        0.03,
    ),
    "ZeRO++": (dict(compress_weights="int8", compress_shards="int4"), 0.01),
    "local SGD 14, int4": (dict(sync_every=14, compress="int4", outer_optimizer="average"), 0.03),
    "DiLoCo 14, int4": (dict(sync_every=14, compress="int4"), 0.03),
    "DiLoCo 14, int4, gentle": (dict(sync_every=14, compress="int4", outer_lr=0.7, outer_momentum=0.4), 0.03),
    "streaming DiLoCo 14, int4": (
        dict(sync_every=14, compress="int4", sync_fragments=2, sync_overlap=1, outer_momentum=0.4),
        0.03,
    ),
    "DiLoCo 100": (dict(sync_every=100), 0.03),
}
"""Keys of the layout, and how far the loss may be above the uncompressed one's. A warm-up below 1 is a share of the steps."""


def make_run(method: str, seed: int, steps: int, replicas: int) -> Run:
    """The run of a method."""
    layout = METHODS[method][0]
    if "compress_warmup" in layout:
        layout = layout | dict(compress_warmup=int(layout["compress_warmup"] * steps))
    train = dict(
        steps=steps,
        global_batch=16,
        seq_len=128,
        lr=3e-3,
        schedule="linear",
        warmup=min(20, steps),
        final_lr=0.02,
        seed=seed,
    )
    return run_from_dict(
        dict(
            model=dict(layers=2, hidden=64, heads=4),
            layout=layout | ({"shard": replicas} if method == "ZeRO++" else {"replicate": replicas}),
            train=train | dict(device="cpu", eval_sequences=256, guard="none"),
        )
    )


def work(rank: int, options: argparse.Namespace, store: str, out: str) -> None:
    """One rank: all methods and seeds, one after the other."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.replicas)
    for seed in options.seeds:
        for method in options.methods:
            run = make_run(method, seed, options.steps, options.replicas)
            source, train_state = TokenSource(run), TrainState(run)
            source.attach(train_state, print, lambda count: None)
            for batch in source.batches(options.steps):
                train_state.train_step(batch)
            loss = source.evaluate()[0]["eval_loss"]
            if rank == 0:
                with Path(out).open("a") as file:
                    file.write(json.dumps(dict(method=method, seed=seed, loss=loss)) + "\n")
    dist.destroy_process_group()


def sent(run: Run) -> float:
    """Bytes to other replicas or shards in a step, in the mean, of the plan."""
    planned = traffic(run).bytes
    return sum(value for axis in ("replicate", "shard") for value in planned.get(axis, {}).values())


def fewer(method: str, options: argparse.Namespace) -> float:
    """How many times less that is than without the method, on the same axis."""
    run = make_run(method, 0, options.steps, options.replicas)
    axes = {axis: getattr(run.layout, axis) for axis in ("replicate", "shard")}
    return sent(replace(run, layout=LayoutConfig(**axes))) / sent(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--out", default="", help="file that losses are added to, a line each")
    parser.add_argument("--known", default="", help="such a file: nothing is trained")
    parser.add_argument("--svg", default="", help="file for a picture of loss against bytes")
    options = parser.parse_args()
    if options.known:
        return show(Path(options.known).read_text(), options)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or f"{folder}/losses"
        spawn(work, (options, f"{folder}/store", out), nprocs=options.replicas)
        return show(Path(out).read_text(), options)


def show(lines: str, options: argparse.Namespace) -> None:
    """Print what was found, and draw it."""
    records = [json.loads(line) for line in lines.splitlines()]
    by_method: dict[str, dict[int, float]] = {}
    for record in records:
        by_method.setdefault(record["method"], {})[record["seed"]] = record["loss"]
    plain, places = by_method["none"], dict[str, tuple[float, float]]()
    print(f"{'method':28} {'loss':>8} {'ratios by seed':>28} {'bound':>7} {'fewer bytes':>12}")
    for method, losses in by_method.items():
        ratios = [losses[seed] / plain[seed] for seed in losses]
        shown = " ".join(f"{ratio:.4f}" for ratio in ratios)
        mean = sum(losses.values()) / len(losses)
        places[method] = (fewer(method, options), sum(ratios) / len(ratios))
        print(f"{method:28} {mean:8.4f} {shown:>28} {1 + METHODS[method][1]:7.2f} {places[method][0]:12.1f}")
    if options.svg:
        hues = list(AXIS.values())
        drawn = [
            Series(name, [place], hues[n % len(hues)], joined=False) for n, (name, place) in enumerate(places.items())
        ]
        title = f"{options.replicas} replicas, {options.steps} steps"
        Path(options.svg).write_text(svg([Plot(title, "times fewer bytes", "loss over that without", drawn)]))


if __name__ == "__main__":
    main()
