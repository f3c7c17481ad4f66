"""What data parallelism costs here beside plain PyTorch scripts, on the CPU, 4 ranks of one thread each.

`layout.shard=4` stands against a script that calls `fully_shard` on every block and on the root, with its defaults;
`layout.replicate=4` against one with DistributedDataParallel. All train the same small Llama (`step_overhead.py`) on the
same batches, one microbatch a step, with clipping and AdamW; a step ends when its loss is a number. Where PyTorch leaves a
choice, the scripts are given what this trainer uses: fused AdamW (with sharded parameters faster than the default),
gradients that live in DDP's buckets, no broadcast of buffers. The scripts report the loss of a rank's own samples, this
trainer that of the whole batch: that sum is part of its price.

The ranks are started once. Steps of the two alternate in the same processes, each after a barrier, and a step takes as
long as its slowest rank; the figure is the median of the ratios of neighbouring steps.

    python benchmarks/parallel_overhead.py [--steps 40] [--layout shard replicate] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from step_overhead import FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, LENGTH, VOCAB, PlainLlama, hand_written
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from shardwise.data.batches import Batch
from shardwise.run import run_from_dict
from shardwise.train.step import TrainState

RANKS, BATCH = 4, 2  # sequences a rank
ALLOWED = 1.05
WARM_UP = 5
PEERS = {"shard": "fully_shard", "replicate": "DDP"}

Step = Callable[[Batch], float]


def plain_step(layout: str) -> Step:
    """The hand-written loop's body."""
    torch.manual_seed(0)
    plain = PlainLlama()
    nn.init.normal_(plain.embed.weight, std=0.02)
    model: nn.Module = plain
    if layout == "shard":
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in plain.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(plain, mesh=mesh)
    else:
        model = DistributedDataParallel(plain, broadcast_buffers=False, gradient_as_bucket_view=True)
    return hand_written(model)


def shardwise_step(layout: str) -> Step:
    """This trainer's step, the one `shardwise train` runs."""
    run = run_from_dict(
        dict(
            model=dict(layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, ffn=FFN, vocab=VOCAB),
            train=dict(seq_len=LENGTH, global_batch=BATCH * RANKS, microbatch=BATCH, device="cpu"),
            layout={layout: RANKS},
        )
    )
    train_state = TrainState(run)
    return lambda batch: train_state.train_step(batch).loss.item()


def slowest(step: Step, batch: Batch) -> float:
    """Seconds that a step takes on the rank that needs longest."""
    dist.barrier()
    start = time.perf_counter()
    step(batch)
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def measure(layout: str, steps: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """Seconds of every step of the two, by turns."""
    both = {PEERS[layout]: plain_step(layout), "shardwise": shardwise_step(layout)}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for n in range(steps + WARM_UP):
        tokens = rng.integers(0, VOCAB, (BATCH, LENGTH + 1))
        batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), None, None)
        # Which of the two goes first alternates, so that neither always finds the caches warm.
        for name in list(both)[:: 1 if n % 2 else -1]:
            taken = slowest(both[name], batch)
            if n >= WARM_UP:
                seconds[name].append(taken)
    return seconds


def work(rank: int, folder: str, layouts: list[str], steps: int) -> None:
    """What each rank does; the first writes the result down."""
    torch.set_num_threads(1)
    # PyTorch 2.13 has a new name for it, which older versions do not know.
    warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rng = np.random.default_rng(rank)
    result = {layout: measure(layout, steps, rng) for layout in layouts}
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def main() -> int:
    """Alternate the two for each layout and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layout", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (folder, args.layout, args.steps), nprocs=RANKS)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    ratios, medians = {}, {}
    for layout, times in seconds.items():
        ratios[layout] = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
        medians[layout] = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    if args.json:
        print(json.dumps(dict(milliseconds=medians, ratios=ratios, allowed=ALLOWED)))
    else:
        for layout, ratio in ratios.items():
            for name, value in medians[layout].items():
                print(f"{name:<12} {value:8.1f} ms a step (median of {args.steps})")
            print(f"layout.{layout}={RANKS}: ratio {ratio:.3f} (at most {ALLOWED})")
    return 0 if max(ratios.values()) <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
