"""One rank of large jobs on one GPU, this project's and torchtitan's, in turns; and this project's beside its plan.

    python benchmarks/gpu/rehearsal.py --peers DIR [--out FILE] beside     # 8B on shard 8, a stage of 70B on tensor 8 x shard 32
    python benchmarks/gpu/rehearsal.py [--out FILE] plan                   # jobs of 8B to 671B, on 8 to 16,384 ranks
    python benchmarks/gpu/rehearsal.py case NAME                           # one of them, in this process

DIR holds torchtitan 0.2.2, unpacked. Both sides have the same shapes, tokens and compiler; torchtitan runs with PyTorch's fake
collectives (`titan`) and with this project's stand-ins (`titan-standin`), which copy what they would have sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

JOBS: dict[str, str] = {
    "8b-shard8": "model.preset=llama3-8b layout.shard=8 train.global_batch=8 train.microbatch=1 train.seq_len=8192",
    "70b-stage": "model.preset=llama3-70b layout.tensor=8 layout.shard=32 layout.pipeline=40 layout.zero=1 layout.schedule=gpipe "
    "train.global_batch=256 train.microbatch=1 train.seq_len=8192",
}
SHAPES: dict[str, dict[str, int]] = {
    "8b-shard8": dict(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    "70b-stage": dict(hidden=8192, layers=2, heads=64, kv_heads=8, ffn=28672, vocab=128256),
}
TITAN: dict[str, dict[str, str]] = {
    "8b-shard8": {"shard": "8"},
    "70b-stage": {"shard": "32", "tensor": "8", "stage": "yes", "microbatches": "8"},
}
COMMON = "train.dtype=bfloat16 cluster.chip=h200 train.device=cuda"


def ours(job: str, rank: int, tune: bool = False) -> dict[str, Any]:
    """This project's rank."""
    from shardwise.measure.rehearse import rehearse
    from shardwise.run import read_run

    run = read_run(None, [*JOBS.get(job, job).split(), *COMMON.split()])
    found = rehearse(run, rank, steps=8, warmup=4, tune=tune)
    named = {d.name: d.second for d in found.quantities}
    took = statistics.median(found.step_seconds)
    return dict(case="shardwise", job=job, ms=1e3 * took, gib=named["memory peak"] / 2**30, **found.as_dict())


def titan(job: str, stand_in: bool) -> dict[str, Any]:
    """torchtitan's rank."""
    import contextlib

    import torch
    from peers import torchtitan

    from shardwise.measure.stand_in import stand_in_collectives

    torch.cuda.set_device(0)
    shape, options = SHAPES[job], TITAN[job]
    world = int(options.get("shard", 1)) * int(options.get("tensor", 1))
    with stand_in_collectives(0, world) if stand_in else contextlib.nullcontext():
        step = torchtitan(shape, 8192, options)
        times = []
        for number in range(12):
            if options.get("stage"):
                local = (1, 8192 // int(options["tensor"]), shape["hidden"])
                x, y = (torch.randn(local, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            else:
                tokens = torch.randint(0, shape["vocab"], (1, 8193), device="cuda")
                x, y = tokens[:, :-1], tokens[:, 1:]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            if number == 4:
                torch.cuda.reset_peak_memory_stats()
            start.record()
            step(x, y)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() / 2**30
    return dict(case="titan-standin" if stand_in else "titan", job=job, ms=statistics.median(times[4:]), gib=peak)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["beside", "case"])
    parser.add_argument("name", nargs="*")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.what == "case":
        case, job, *rest = args.name
        if case.startswith("shardwise"):
            found = ours(job, int(rest[0]) if rest else 0, tune=case == "shardwise-tune")
        else:
            found = titan(job, case == "titan-standin")
        print("RESULT " + json.dumps(found))
        return
    rows = []
    jobs = args.name or list(JOBS)
    for _ in range(args.rounds):
        for job in jobs:
            for case in ("shardwise", "titan", "titan-standin"):
                rank = ["2560"] if (case, job) == ("shardwise", "70b-stage") else []
                command = [sys.executable, __file__, "case", case, job, *rank]
                done = subprocess.run(command, capture_output=True, text=True)
                lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                row = json.loads(lines[-1][7:]) if lines else dict(case=case, job=job, error=done.stderr[-1500:])
                rows.append(row)
                print(
                    json.dumps({k: v for k, v in row.items() if k in ("case", "job", "ms", "gib", "error")}), flush=True
                )
                if args.out:
                    args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
