"""What a checkpoint costs a run: how long training waits, how fast the bytes reach the disk, how much memory it takes.

A model of 89 million parameters with AdamW's state beside them, 1 GiB, is saved by the saver that `shardwise train` uses. Its
peers are measured in the same process, in turn with it: one copy of as many bytes from memory to memory, and one plain file of
as many bytes, written in order and brought to the disk. Figures are medians of the ratios of neighbours. Removing what was
written, by either, is not counted.

    python benchmarks/checkpoint_cost.py [--rounds 7] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from shardwise.checkpoint.folder import folder_of_step
from shardwise.checkpoint.format import BLOCK
from shardwise.checkpoint.saver import Saver
from shardwise.data.batches import Batch
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.run import run_from_dict
from shardwise.train.step import TrainState

BLOCKED, WRITTEN, MEMORY = 1.5, 0.7, 1.05  # most of a memcpy, least of the disk's speed, most copies in memory


def make_train_state() -> TrainState:
    """A train state of 1 GiB, after one step, so that the optimizer has its state."""
    model = dict(layers=7, hidden=1024, heads=8, kv_heads=8, ffn=2752, vocab=257)
    train = dict(seq_len=16, global_batch=1, device="cpu", keep=1000, eval_every=0)
    train_state = TrainState(run_from_dict(dict(model=model, train=train)))
    step(train_state)
    return train_state


def step(train_state: TrainState) -> float:
    """Seconds of a step."""
    began = time.perf_counter()
    tokens = np.random.default_rng(train_state.step).integers(0, 257, (1, 17))
    train_state.train_step(Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), None, None)).loss.item()
    return time.perf_counter() - began


def resident(kind: str) -> int:
    """Bytes of memory this process has (`VmRSS`) or has had at most (`VmHWM`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status does not say {kind}")


def write_plainly(folder: Path, data: memoryview) -> float:
    """Seconds to write one file in order and have it on the disk."""
    path = folder / "plain"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as f:
        for start in range(0, len(data), BLOCK):
            f.write(data[start : start + BLOCK])
        os.fsync(f.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def main() -> int:
    """Measure in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="where to write; the disk to measure (default: the temporary folder)"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    train_state = make_train_state()
    out = Path(tempfile.mkdtemp(prefix="checkpoint-cost-", dir=args.folder))
    try:
        figures = measure(train_state, out, args.rounds)
    finally:
        shutil.rmtree(out)
    good = figures["blocked"] <= BLOCKED and figures["speed"] >= WRITTEN and figures["copies"] <= MEMORY
    if args.json:
        print(json.dumps(figures))
    else:
        print(f"{figures['bytes'] / 2**30:.2f} GiB, {args.rounds} rounds after a first one that is not counted")
        print(f"training waits {figures['wait_ms']:.0f} ms: {figures['blocked']:.2f} of a memcpy (at most {BLOCKED})")
        print(f"  the first save, whose memory is new: {figures['first_blocked']:.2f} of a memcpy into new memory")
        print(f"saved at {figures['mb_per_s']:.0f} MB/s: {figures['speed']:.2f} of a plain file (at least {WRITTEN})")
        print(f"memory at its peak: {figures['copies']:.2f} copies of the state (at most {MEMORY})")
        print(f"a step while a checkpoint is written: {figures['step']:.2f} of a step in peace")
    return 0 if good else 1


def measure(train_state: TrainState, out: Path, rounds: int) -> dict[str, float]:
    """The figures, by name."""
    saver = Saver(out, train_state.mesh, ByteTokenizer(), "none", lambda _: None)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building the model
    before = resident("VmRSS")
    began = time.perf_counter()
    saver.save(train_state)
    first = time.perf_counter() - began
    assert saver.finish() == ""
    copies = (resident("VmHWM") - before) / saver.staging.block.numel()

    source = saver.staging.block.clone()
    size = len(source)
    began = time.perf_counter()
    target = torch.empty_like(source)
    target.copy_(source)
    first_blocked = first / (time.perf_counter() - began)
    blocked: list[float] = []
    speed: list[float] = []
    waits: list[float] = []
    saves: list[float] = []
    during: list[float] = []
    peace: list[float] = []
    for _ in range(rounds):
        plain = write_plainly(out, source.numpy().data)
        began = time.perf_counter()
        target.copy_(source)
        memcpy = time.perf_counter() - began
        train_state.step += 1
        began = time.perf_counter()
        saver.save(train_state)
        waits.append(time.perf_counter() - began)
        assert saver.finish() == ""
        saves.append(time.perf_counter() - began)
        shutil.rmtree(folder_of_step(out, train_state.step))
        blocked.append(waits[-1] / memcpy)
        speed.append(plain / saves[-1])
    for _ in range(rounds):
        peace.append(step(train_state))
        saver.save(train_state)
        during.append(step(train_state))
        assert saver.finish() == ""
        shutil.rmtree(folder_of_step(out, train_state.step - 1))
    return dict(
        bytes=size,
        wait_ms=statistics.median(waits) * 1e3,
        blocked=statistics.median(blocked),
        first_blocked=first_blocked,
        mb_per_s=size / statistics.median(saves) / 1e6,
        speed=statistics.median(speed),
        copies=copies,
        step=statistics.median(a / b for a, b in zip(during, peace, strict=True)),
    )


if __name__ == "__main__":
    sys.exit(main())
