"""This trainer on one GPU, measured in the format that `shardwise validate` predicts: seconds a step, peak memory.

Llama-like models of three sizes, sequences of 2048 to 131072 tokens, compiled or not, recomputation none, attention and full, in
bfloat16 with float32 parameters and AdamW; three dozen of other shapes, with GEMMs in fp8 and experts. `--set unseen` measures a
dozen that no constant has seen. A step is the trainer's own on random tokens, as its loop runs it (replayed where the host is
slower, read when the next is begun); its time is the median distance of CUDA events after warm-up, its memory the allocator's peak.
Writes rows to a JSON file.

    python benchmarks/gpu/own_runs.py --output rows.json [--set fitted|unseen] [--steps 12] [--graph] [--only NAME …]
    python benchmarks/gpu/own_runs.py --table rows.json      # measured beside planned, as in RESULTS.md; needs no GPU
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, need_gpu

from shardwise.measure.verify import random_batch
from shardwise.run import run_from_dict
from shardwise.train.cuda_graph import attach
from shardwise.train.progress.result import StepResult
from shardwise.train.step import TrainState

WARM = 12
"""Steps before those that count."""
LONG = 1.5
"""Of steps with more seconds than this fewer are timed: they are too long for the host to matter."""

OWN: dict[str, dict[str, int]] = SHAPES | {
    "0.2B": dict(layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=50304),
    "0.8B": dict(layers=20, hidden=1536, heads=12, kv_heads=4, ffn=6144, vocab=32768),
    "2.2B": dict(layers=20, hidden=2560, heads=20, kv_heads=20, ffn=8192, vocab=65536),
    "4.6B": dict(layers=24, hidden=4096, heads=32, kv_heads=8, ffn=11008, vocab=32000),
    # of the latest
    "0.3B": dict(layers=24, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=64000),
    "1.1B": dict(layers=22, hidden=2048, heads=16, kv_heads=4, ffn=5632, vocab=32000),
    "2.9B": dict(layers=32, hidden=2560, heads=20, kv_heads=20, ffn=6912, vocab=50304),
    "5.4B": dict(layers=32, hidden=3584, heads=28, kv_heads=4, ffn=11264, vocab=65536),
    "8x1.5B": dict(
        layers=10, hidden=1536, heads=12, kv_heads=4, ffn=4096, vocab=32768,
        experts=8, experts_per_token=2, expert_ffn=4096,
    ),
    "32x0.7B": dict(
        layers=12, hidden=1280, heads=10, kv_heads=10, ffn=3584, vocab=65536,
        experts=32, experts_per_token=4, expert_ffn=768, shared_experts=1, dense_layers=1,
    ),
    # of those that no constant has seen
    "0.6B": dict(layers=28, hidden=1024, heads=16, kv_heads=8, ffn=3072, vocab=151936),
    "0.7B": dict(layers=12, hidden=1792, heads=14, kv_heads=2, ffn=4864, vocab=65536),
    "1.3B": dict(layers=24, hidden=2048, heads=32, kv_heads=32, ffn=5504, vocab=50304),
    "2.5B": dict(layers=18, hidden=3072, heads=24, kv_heads=24, ffn=10240, vocab=32768),
    "4.8B": dict(layers=28, hidden=3840, heads=30, kv_heads=6, ffn=10240, vocab=64000),
    "8x3B": dict(
        layers=8, hidden=2048, heads=16, kv_heads=4, ffn=7168, vocab=32000,
        experts=8, experts_per_token=2, expert_ffn=7168,
    ),
    "48x1.4B": dict(
        layers=12, hidden=1536, heads=12, kv_heads=12, ffn=4096, vocab=50304,
        experts=48, experts_per_token=4, expert_ffn=512, shared_experts=1, dense_layers=1,
    ),
    # of the third dozen
    "0.5B": dict(layers=16, hidden=1280, heads=10, kv_heads=10, ffn=5120, vocab=100352),
    "1.8B": dict(layers=24, hidden=2304, heads=18, kv_heads=6, ffn=6144, vocab=49152),
    "3.1B": dict(layers=26, hidden=3072, heads=24, kv_heads=8, ffn=8192, vocab=32000),
    "6.7B": dict(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000),
    "4x1.9B": dict(
        layers=12, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=50304,
        experts=4, experts_per_token=1, expert_ffn=5632,
    ),
    "128x2B": dict(
        layers=10, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=32768,
        experts=128, experts_per_token=8, expert_ffn=512,
    ),
    # of the later ones
    "16x0.3B": dict(
        layers=12, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=50304,
        experts=16, experts_per_token=2, expert_ffn=2048,
    ),
    "64x2B": dict(
        layers=8, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=50304,
        experts=64, experts_per_token=6, expert_ffn=1024, shared_experts=2, dense_layers=1,
    ),
}  # fmt: skip

Timed = tuple[str, int, int, int, str, bool, str]
LATER: list[Timed] = [
    # model, sequence, microbatch, microbatches, recompute, compile, fp8
    ("0.2B", 2048, 16, 1, "none", True, "none"),
    ("0.2B", 131072, 1, 1, "full", True, "none"),
    ("0.8B", 16384, 2, 1, "none", True, "none"),
    ("0.8B", 65536, 1, 1, "full", True, "none"),
    ("2.2B", 4096, 4, 1, "none", True, "none"),
    ("2.2B", 4096, 4, 1, "none", True, "tensorwise"),
    ("2.2B", 8192, 2, 2, "full", False, "none"),
    ("4.6B", 4096, 4, 1, "full", True, "rowwise"),
    ("4.6B", 2048, 4, 2, "none", True, "none"),
    ("16x0.3B", 4096, 4, 1, "none", False, "none"),
    ("16x0.3B", 8192, 4, 1, "full", True, "none"),
    ("64x2B", 4096, 4, 1, "none", True, "none"),
]
LATEST: list[Timed] = [
    # the same, of shapes that none of the others have
    ("0.3B", 4096, 8, 1, "none", True, "none"),
    ("0.3B", 131072, 1, 1, "full", True, "none"),
    ("1.1B", 2048, 8, 2, "none", True, "none"),
    ("1.1B", 32768, 1, 1, "full", True, "none"),
    ("1.1B", 8192, 2, 2, "attention", False, "none"),
    ("2.9B", 4096, 4, 1, "full", True, "none"),
    ("2.9B", 8192, 2, 1, "none", True, "tensorwise"),
    ("2.9B", 4096, 2, 2, "none", True, "rowwise"),
    ("5.4B", 2048, 4, 1, "full", True, "none"),
    ("5.4B", 16384, 1, 1, "full", True, "tensorwise"),
    ("8x1.5B", 4096, 4, 1, "none", False, "none"),
    ("32x0.7B", 8192, 2, 1, "none", True, "none"),
]
THIRD: list[Timed] = [
    ("0.5B", 2048, 8, 1, "none", True, "none"),
    ("0.5B", 16384, 2, 1, "none", False, "none"),
    ("0.5B", 131072, 1, 1, "full", True, "none"),
    ("1.8B", 4096, 4, 2, "none", True, "none"),
    ("1.8B", 8192, 2, 1, "full", True, "tensorwise"),
    ("3.1B", 4096, 4, 1, "none", True, "rowwise"),
    ("3.1B", 65536, 1, 1, "full", True, "none"),
    ("6.7B", 4096, 2, 1, "full", True, "none"),
    ("6.7B", 8192, 1, 1, "full", True, "tensorwise"),
    ("4x1.9B", 4096, 4, 1, "none", True, "none"),
    ("128x2B", 4096, 4, 1, "none", False, "none"),
]
UNSEEN: list[Timed] = [
    ("0.6B", 2048, 8, 2, "none", True, "none"),
    ("0.7B", 4096, 8, 1, "none", False, "none"),
    ("0.7B", 131072, 1, 1, "full", True, "none"),
    ("1.3B", 2048, 8, 1, "none", True, "tensorwise"),
    ("1.3B", 8192, 4, 1, "full", True, "none"),
    ("2.5B", 4096, 4, 1, "none", True, "none"),
    ("2.5B", 4096, 2, 2, "attention", False, "none"),
    ("2.5B", 16384, 1, 1, "full", True, "rowwise"),
    ("4.8B", 4096, 2, 2, "full", True, "tensorwise"),
    ("4.8B", 32768, 1, 1, "full", True, "none"),
    ("8x3B", 4096, 4, 1, "none", True, "none"),
    ("48x1.4B", 4096, 4, 1, "none", False, "none"),
]
RUNS: list[tuple[str, int, int, int, str, bool]] = [
    # the same, in bfloat16
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
SETS: dict[str, Sequence[Any]] = dict(fitted=[*RUNS, *LATER, *LATEST, *THIRD], unseen=UNSEEN)


def name_of(model: str, seq_len: int, micro: int, times: int, recompute: str, compiled: bool, fp8: str = "none") -> str:
    """What a row is called."""
    words = [f"own_{model}_s{seq_len}_mb{micro}x{times}_{recompute}", *["compile"] * compiled, *[fp8] * (fp8 != "none")]
    return "_".join(words)


def measure(
    model: str,
    seq_len: int,
    micro: int,
    times: int,
    recompute: str,
    compiled: bool,
    fp8: str = "none",
    *,
    steps: int,
    graph: bool | str = "auto",
) -> dict[str, Any]:
    """One run, as a row."""
    began = time.perf_counter()
    run = run_from_dict(
        dict(
            model=OWN[model],
            layout=dict(recompute=recompute),
            train=dict(
                seq_len=seq_len,
                global_batch=micro * times,
                microbatch=micro,
                dtype="bfloat16",
                fp8=fp8,
                device="cuda",
                compile=compiled,
                cuda_graph=graph,
            ),
        )
    )
    torch.cuda.reset_peak_memory_stats()
    train_state = TrainState(run)
    attach(train_state)
    batch = random_batch(run)
    ends: list[torch.cuda.Event] = []
    result: StepResult | None = None
    warm, last = WARM, steps + WARM
    while len(ends) < last:
        previous, result = result, train_state.train_step(batch)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        if previous is not None:
            previous.read()  # as the loop does, when the next is begun
        if len(ends) == 2:  # the first steps also hold what compiling needed
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if len(ends) == 4:
            torch.cuda.synchronize()
            if ends[-2].elapsed_time(ends[-1]) / 1e3 > LONG:
                warm, last = 4, 6
    torch.cuda.synchronize()
    taken = [a.elapsed_time(b) / 1e3 for a, b in pairwise(ends[warm - 1 :])]
    shape = OWN[model]
    experts = (
        dict(zip(("topk", "moe_ffn"), (shape[k] for k in ("experts_per_token", "expert_ffn")), strict=True))
        if "experts" in shape
        else {}
    )
    return {
        "id": name_of(model, seq_len, micro, times, recompute, compiled, fp8),
        "source": "this project's trainer, benchmarks/gpu/own_runs.py",
        "group": "shardwise_h200",
        "kind": "training",
        "hardware": dict(gpu=torch.cuda.get_device_name(), gpus=1, gpus_per_node=8, chip="h200-sxm", intra_gbs=450, inter_gbs=50),
        "model": dict(arch="moe" if experts else "llama", seq=seq_len, act="swiglu", tied_embeddings=False, **shape, **experts),
        "parallel": dict(
            tp=1, pp=1, dp=1, cp=1, ep=1, vpp=1, zero_stage=0, sp=True, compile=compiled,
            recompute="selective" if recompute == "attention" else recompute,
        ),
        "global_batch": micro * times,
        "micro_batch": micro,
        "precision": "bf16" if fp8 == "none" else "fp8",
        "software": dict(framework="shardwise") | (dict(fp8_recipe=fp8) if fp8 != "none" else {}),
        "measured": dict(
            iter_time_s=statistics.median(taken),
            memory_gib=torch.cuda.max_memory_allocated() / 2**30,
            memory_reserved_gib=torch.cuda.max_memory_reserved() / 2**30,
        ),
        "note": f"PyTorch {torch.__version__}; allocated at the peak; median of {len(taken)} steps",
        "seconds_in_all": time.perf_counter() - began,
        "complete": True,
    }  # fmt: skip


def table(path: Path) -> None:
    """Measured beside planned. The plan's constants have seen those rows of `RUNS`, and no others."""
    from shardwise.plan.plan import plan_job
    from shardwise.plan.published.rows import job_of_row, own_run

    print("| run | step, measured | planned | | peak memory, measured | planned | |\n|---|---|---|---|---|---|---|")
    for row in json.loads(path.read_text()):
        account = plan_job(own_run(row), job_of_row(row).job).account
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
    parser.add_argument("--set", choices=list(SETS), default="fitted", help="unseen: runs that no constant has seen")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--graph", action="store_true", help="replay the passes as a CUDA graph in any case")
    args = parser.parse_args()
    if args.table:
        table(args.table)
        return 0
    need_gpu()
    rows = []
    runs = SETS[args.set]
    for run in runs:
        if args.only and name_of(*run) not in args.only:
            continue
        try:
            rows.append(measure(*run, steps=args.steps, graph=args.graph or "auto"))
            print(name_of(*run), rows[-1]["measured"], flush=True)
        except Exception:  # one run that does not go must not cost the others
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        args.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return 0 if len(rows) == len(runs) or args.only else 1


if __name__ == "__main__":
    sys.exit(main())
