"""This trainer on one GPU, measured in the format that `shardwise validate` predicts: seconds a step, peak memory.

Llama-like models of three sizes, sequences of 2048 to 131072 tokens, compiled or not, recomputation none, attention and full, in
bfloat16 with float32 parameters and AdamW. A step is the trainer's own on random tokens, as its loop runs it (replayed where
the host is slower, read when the next is begun); its time is the median distance of CUDA events after warm-up, its memory the
allocator's peak. Writes rows to a JSON file.

    python benchmarks/gpu/own_runs.py --output rows.json [--steps 12] [--only NAME …]
    python benchmarks/gpu/own_runs.py --table rows.json      # measured beside planned, as in RESULTS.md; needs no GPU
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, need_gpu

from shardwise.measure.verify import random_batch
from shardwise.run import run_from_dict
from shardwise.train.cuda_graph import attach
from shardwise.train.result import StepResult
from shardwise.train.step import TrainState

WARM = 8
"""Steps before those that count."""

RUNS: list[tuple[str, int, int, int, str, bool]] = [
    # model, sequence, microbatch, microbatches, recompute, compile
    ("0.4B", 2048, 1, 1, "none", True),
    ("0.4B", 2048, 8, 1, "none", False),
    ("0.4B", 2048, 8, 1, "none", True),
    ("0.4B", 8192, 4, 1, "none", False),
    ("0.4B", 8192, 4, 1, "full", True),
    ("1.5B", 4096, 4, 1, "none", False),
    ("1.5B", 4096, 4, 1, "none", True),
    ("1.5B", 4096, 4, 1, "attention", False),
    ("1.5B", 4096, 8, 1, "none", True),
    ("1.5B", 4096, 8, 1, "full", False),
    ("1.5B", 4096, 8, 1, "full", True),
    ("1.5B", 8192, 2, 2, "none", True),
    ("1.5B", 2048, 8, 2, "none", False),
    ("1.5B", 32768, 1, 1, "none", True),
    ("1.5B", 131072, 1, 1, "full", True),
    ("3.6B", 4096, 2, 1, "none", False),
    ("3.6B", 4096, 2, 1, "none", True),
    ("3.6B", 4096, 4, 1, "full", False),
    ("3.6B", 8192, 2, 1, "full", True),
    ("3.6B", 8192, 1, 2, "attention", False),
]


def name_of(model: str, seq_len: int, micro: int, times: int, recompute: str, compiled: bool) -> str:
    """What a row is called."""
    return f"own_{model}_s{seq_len}_mb{micro}x{times}_{recompute}" + ("_compile" if compiled else "")


def measure(
    model: str, seq_len: int, micro: int, times: int, recompute: str, compiled: bool, steps: int
) -> dict[str, Any]:
    """One run, as a row."""
    run = run_from_dict(
        dict(
            model=SHAPES[model],
            layout=dict(recompute=recompute),
            train=dict(
                seq_len=seq_len,
                global_batch=micro * times,
                microbatch=micro,
                dtype="bfloat16",
                device="cuda",
                compile=compiled,
            ),
        )
    )
    torch.cuda.reset_peak_memory_stats()
    train_state = TrainState(run)
    attach(train_state)
    batch = random_batch(run)
    ends: list[torch.cuda.Event] = []
    result: StepResult | None = None
    for n in range(steps + WARM):
        previous, result = result, train_state.train_step(batch)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        if previous is not None:
            previous.read()  # as the loop does, when the next is begun
        if n == 1:  # the first steps also hold what compiling needed
            torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    taken = [a.elapsed_time(b) / 1e3 for a, b in pairwise(ends[WARM - 1 :])]
    shape = SHAPES[model]
    return {
        "id": name_of(model, seq_len, micro, times, recompute, compiled),
        "source": "this project's trainer, benchmarks/gpu/own_runs.py",
        "group": "shardwise_h200",
        "kind": "training",
        "hardware": dict(gpu=torch.cuda.get_device_name(), gpus=1, gpus_per_node=8, chip="h200-sxm", intra_gbs=450, inter_gbs=50),
        "model": dict(arch="llama", seq=seq_len, act="swiglu", tied_embeddings=False, **shape),
        "parallel": dict(
            tp=1, pp=1, dp=1, cp=1, ep=1, vpp=1, zero_stage=0, sp=True, compile=compiled,
            recompute="selective" if recompute == "attention" else recompute,
        ),
        "global_batch": micro * times,
        "micro_batch": micro,
        "precision": "bf16",
        "measured": dict(
            iter_time_s=statistics.median(taken),
            memory_gib=torch.cuda.max_memory_allocated() / 2**30,
            memory_reserved_gib=torch.cuda.max_memory_reserved() / 2**30,
        ),
        "note": f"PyTorch {torch.__version__}; allocated at the peak; median of {steps} steps",
        "complete": True,
    }  # fmt: skip


def table(path: Path) -> None:
    """Measured beside planned. The plan's constants have seen these rows."""
    from shardwise.plan.plan import plan
    from shardwise.plan.published.rows import own_run

    print("| run | step, measured | planned | | peak memory, measured | planned | |\n|---|---|---|---|---|---|---|")
    for row in json.loads(path.read_text()):
        account = plan(own_run(row)).account
        owners = account.memory.ranks[0]
        peak = sum(size for owner, size in owners.items() if owner != "workspace") / 2**30
        seconds, gib = row["measured"]["iter_time_s"], row["measured"]["memory_gib"]
        print(
            f"| {row['id'].removeprefix('own_')} | {seconds * 1e3:.0f} ms | {account.step_seconds * 1e3:.0f} ms "
            f"| {account.step_seconds / seconds - 1:+.1%} | {gib:.2f} GiB | {peak:.2f} GiB | {peak / gib - 1:+.1%} |"
        )


def main() -> int:
    """Measure every run and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("rows.json"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    if args.table:
        table(args.table)
        return 0
    need_gpu()
    rows = []
    for run in RUNS:
        if args.only and name_of(*run) not in args.only:
            continue
        try:
            rows.append(measure(*run, args.steps))
            print(name_of(*run), rows[-1]["measured"], flush=True)
        except Exception:  # one run that does not go must not cost the others
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        args.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return 0 if len(rows) == len(RUNS) or args.only else 1


if __name__ == "__main__":
    sys.exit(main())
