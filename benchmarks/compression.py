"""What compressed gradients and rarely speaking replicas cost in learning: validation loss beside the uncompressed run's.

A model smaller than the demo's (2 layers of 64, sequences of 128) learns the demo's data, the text that ships with Python, by
AdamW. All methods see the same tokens in the same order, from the same initial weights; each is run for some seeds. Replicas are
real ranks over gloo, started once, with a thread each; `--at-once` groups of them share the work. What is printed is the loss on
held-out sequences behind the last step, its ratio to the uncompressed run's of the same seed and the mean of these, and how many
times fewer bytes the plan says that a rank sends to other replicas. `none, again` is the uncompressed run in another order of
addition: what it differs by is the noise of the measure.

    python benchmarks/compression.py [--steps 1500] [--batch 32] [--replicas 4] [--seeds 0 1 2] [--methods none int8] [--at-once 4]
        [--within 500] [--out FILE] [--json FILE] [--svg FILE]

`--at-once 4 --within 400` needs 16 cores and begins nothing after 400 seconds, in the order of the seeds. The same command again
goes on where `--out` ends.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
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
from shardwise.train.batches.source import TokenSource
from shardwise.train.step import TrainState

METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "none": ({}, 0.0),
    "none, again": (dict(zero=3), 0.0),
    "int8": (dict(compress="int8"), 0.01),
    "fp8": (dict(compress="fp8"), 0.01),
    "int4": (dict(compress="int4"), 0.02),
    "ZeRO++": (dict(compress_weights="int8", compress_shards="int4"), 0.01),
    "activations in 4 bits": (dict(activation_bits=4), 0.005),
    "activations in 2 bits": (dict(activation_bits=2), 0.005),
    "onebit": (dict(compress="onebit", compress_warmup=0.2), 0.01),
    "powersgd 4": (dict(compress="powersgd", compress_rank=4, compress_warmup=0.2), 0.01),
    "topk 1%": (dict(compress="topk", compress_warmup=0.2), 0.03),
    "topk 1%, momentum 0.9": (dict(compress="topk", compress_momentum=0.9, compress_warmup=0.2), 0.03),
    "DiLoCo 15, int4": (dict(sync_every=15, compress="int4", compress_warmup=0.25), 0.03),
    "DiLoCo 15, int4, gentle": (
        dict(sync_every=15, compress="int4", compress_warmup=0.25, outer_momentum=0.4),
        0.03,
    ),
    "local SGD 15, int4": (
        dict(sync_every=15, compress="int4", compress_warmup=0.25, outer_optimizer="average"),
        0.03,
    ),
    "powersgd 4, at once": (dict(compress="powersgd", compress_rank=4), 0.01),
    "topk 1%, at once": (dict(compress="topk", compress_density=0.01), 0.03),
    "DiLoCo 15, int4, at once": (dict(sync_every=15, compress="int4"), 0.03),
    "DiLoCo 100": (dict(sync_every=100, compress_warmup=0.25), 0.03),
}
"""Keys of the layout, and how far the loss may be above the uncompressed one's. A warm-up below 1 is a share of the steps."""
SHARDED = ("ZeRO++", "none, again")
"""Methods whose ranks are shards instead of replicas."""


def make_run(method: str, seed: int, options: argparse.Namespace) -> Run:
    """The run of a method."""
    steps, replicas = options.steps, options.replicas
    layout = dict(METHODS[method][0])
    memory = {name: layout.pop(name) for name in ("activation_bits",) if name in layout}
    if "compress_warmup" in layout:
        layout = layout | dict(compress_warmup=int(layout["compress_warmup"] * steps))
    train = dict(
        steps=steps,
        global_batch=options.batch,
        seq_len=128,
        lr=3e-3,
        schedule="cosine",
        warmup=min(50, steps),
        final_lr=0.02,
        seed=seed,
    )
    return run_from_dict(
        dict(
            model=dict(layers=2, hidden=64, heads=4),
            memory=memory,
            layout=layout | ({"shard": replicas} if method in SHARDED else {"replicate": replicas}),
            train=train | dict(device="cpu", eval_sequences=512, guard="none"),
        )
    )


def work(rank: int, options: argparse.Namespace, group: int, folder: str, out: str) -> None:
    """One rank of a group: its methods and seeds, one after the other."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store-{group}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.replicas)
    for seed, method in options.jobs[group :: options.at_once]:
        late = torch.tensor([time.time() > options.until])
        dist.broadcast(late, 0)
        if late:
            break
        run = make_run(method, seed, options)
        source, train_state = TokenSource(run), TrainState(run)
        source.attach(train_state, print, lambda count: None)
        start = time.time()
        for batch in source.batches(options.steps):
            train_state.train_step(batch)
        loss = source.evaluate()[0]["eval_loss"]
        if rank == 0:
            record = dict(method=method, seed=seed, loss=loss, seconds=time.time() - start)
            with Path(out).open("a") as file:
                file.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


def sent(run: Run) -> float:
    """Bytes to other replicas or shards in a step, in the mean, of the plan."""
    planned = traffic(run).bytes
    return sum(value for axis in ("replicate", "shard") for value in planned.get(axis, {}).values())


def fewer(method: str, options: argparse.Namespace) -> float:
    """How many times less that is than without the method, on the same axis."""
    run = make_run(method, 0, options)
    axes = {axis: getattr(run.layout, axis) for axis in ("replicate", "shard")}
    return sent(replace(run, layout=LayoutConfig(**axes))) / sent(run) if options.replicas > 1 else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--at-once", type=int, default=1, help="groups of ranks that train side by side")
    parser.add_argument("--within", type=float, default=1e9, help="seconds after which no further run is begun")
    parser.add_argument("--out", default="", help="file that losses are added to; what it has is not run again")
    parser.add_argument("--known", default="", help="such a file: nothing is trained")
    parser.add_argument("--json", default="", help="file for the table")
    parser.add_argument("--svg", default="", help="file for a picture of loss against bytes")
    options = parser.parse_args()
    if options.known:
        return show(read(Path(options.known)), options)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or f"{folder}/losses"
        options.until = time.time() + options.within
        known = {(each["seed"], each["method"]) for each in read(Path(out))}
        every = [(seed, method) for seed in options.seeds for method in options.methods]
        options.jobs = [job for job in every if job not in known]
        groups = [
            spawn(work, (options, group, folder, out), nprocs=options.replicas, join=False)
            for group in range(options.at_once)
        ]
        for group in groups:
            while group is not None and not group.join():
                pass
        return show(read(Path(out)), options)


def read(path: Path) -> list[dict[str, Any]]:
    """What a file holds; nothing, where there is none yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(records: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print what was found, and draw it."""
    by_method: dict[str, dict[int, float]] = {}
    for record in records:
        by_method.setdefault(record["method"], {})[record["seed"]] = record["loss"]
    plain, places = by_method.get("none", {}), dict[str, tuple[float, float]]()
    table: list[dict[str, Any]] = []
    print(f"{'method':28} {'loss':>8} {'ratios by seed':>28} {'mean':>7} {'bound':>6} {'fewer bytes':>12} {'s':>5}")
    seconds = {record["method"]: record.get("seconds", 0.0) for record in records}
    for method, losses in by_method.items():
        ratios = [losses[seed] / plain[seed] for seed in losses if seed in plain]
        if not ratios:
            continue
        shown = " ".join(f"{ratio:.4f}" for ratio in ratios)
        mean = sum(losses.values()) / len(losses)
        places[method] = (fewer(method, options), sum(ratios) / len(ratios))
        times, ratio = places[method]
        bound = 1 + METHODS[method][1]
        found = dict(method=method, losses=losses, ratios=ratios, ratio=ratio, bound=bound, holds=ratio <= bound)
        table.append(found | dict(fewer_bytes=times, seconds=seconds[method]))
        print(f"{method:28} {mean:8.4f} {shown:>28} {ratio:7.4f} {bound:6.3f} {times:12.1f} {seconds[method]:5.0f}")
    if options.json:
        settings = {key: getattr(options, key) for key in ("steps", "batch", "replicas", "seeds")}
        Path(options.json).write_text(json.dumps(dict(settings=settings, methods=table), indent=1))
    if options.svg:
        hues = list(AXIS.values())
        drawn = [
            Series(name, [place], hues[n % len(hues)], joined=False) for n, (name, place) in enumerate(places.items())
        ]
        title = f"{options.replicas} replicas, {options.steps} steps of {options.batch} sequences"
        Path(options.svg).write_text(svg([Plot(title, "times fewer bytes", "loss over that without", drawn)]))


if __name__ == "__main__":
    main()
