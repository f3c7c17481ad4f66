"""The memory of this trainer on a GPU, moment by moment and owner by owner, beside its plan: the allocator's history of steps
recorded by `shardwise profile`, told by the reader of `shardwise trace`. What must hold: the peak within 3% of the plan.

Needs PyTorch and this package alone.

    python benchmarks/gpu/memory_curve.py --output FILE.json [--only NAME …] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapes import need_gpu

from shardwise.cli.trace.memory import as_record, planned_of
from shardwise.hardware.chips import chip_of_driver_name
from shardwise.run import read_run
from shardwise.trace.memory.history import explain_snapshot
from shardwise.trace.memory.snapshot import read_profiled

SMALL = dict(layers=8, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000)
MIDDLE = dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256)
MIXTURE = SMALL | dict(experts=8, experts_per_token=2, expert_ffn=1408, dense_layers=1)
PLAIN = dict(compile=False, cuda_graph=False)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # model, layout, train
    "small": (SMALL, {}, PLAIN | dict(seq_len=2048, global_batch=8, microbatch=8)),
    "accumulated": (SMALL, {}, PLAIN | dict(seq_len=2048, global_batch=16, microbatch=4)),
    "middle": (MIDDLE, {}, PLAIN | dict(seq_len=2048, global_batch=8, microbatch=4)),
    "middle-full": (MIDDLE, dict(recompute="full"), PLAIN | dict(seq_len=2048, global_batch=16, microbatch=8)),
    "middle-attention": (MIDDLE, dict(recompute="attention"), PLAIN | dict(seq_len=2048, global_batch=8, microbatch=4)),
    "middle-muon": (MIDDLE, {}, PLAIN | dict(seq_len=2048, global_batch=8, microbatch=4, optimizer="muon")),
    "mixture": (MIXTURE, {}, PLAIN | dict(seq_len=2048, global_batch=8, microbatch=4)),
}
ALLOWED = 0.03


def record(name: str, folder: Path, device: str) -> None:
    """Run the verb."""
    model, layout, train = RUNS[name]
    sections = dict(model=model, layout=layout, train=dict(dtype="bfloat16", device=device) | train)
    keys = [
        f"--{section}.{key}={json.dumps(value)}"
        for section, values in sections.items()
        for key, value in values.items()
    ]
    empty = folder.parent / f"{name}.toml"
    empty.write_text(f'name = "{name}"\n')
    command = [sys.executable, "-m", "shardwise", "profile", str(empty), "--out", str(folder), "--steps", "2"]
    subprocess.run([*command, *keys], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Record, tell, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpu()
    import torch

    found, good = {}, True
    for name in args.only:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / name
            record(name, folder, args.device)
            file = folder / "memory" / "rank-00000.json.gz"
            snapshot = read_profiled(file, 0)
            if snapshot is None:
                print(f"{name}: no history, since there is no GPU", flush=True)
                continue
            run = read_run(folder / "run.toml", [])
        chip = chip_of_driver_name(torch.cuda.get_device_name(0))
        if chip is not None and not run.cluster.chip:
            run = replace(run, cluster=replace(run.cluster, chip=chip.name))
        history, plan = explain_snapshot(snapshot), planned_of(run, 0)
        planned = sum(plan.owners.values())
        off = history.peak / planned - 1
        good = good and abs(off) <= ALLOWED
        found[name] = dict(history=as_record(history), plan=dict(plan.owners), off=off)
        print(f"{name}: peak {history.peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f} GiB, {off:+.1%} (limit {ALLOWED:.0%}); "
              f"reserved {history.reserved / 2**30:.2f} GiB", flush=True)  # fmt: skip
        for owner in dict.fromkeys([*plan.owners, *history.owners]):
            held, there = history.owners.get(owner, 0) / 2**30, plan.owners.get(owner, 0.0) / 2**30
            print(f"    {owner:12} {held:8.3f} GiB, planned {there:8.3f}", flush=True)
    args.output.write_text(json.dumps(found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
