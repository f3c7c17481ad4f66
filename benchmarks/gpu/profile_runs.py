"""Profiles of this trainer on one GPU, recorded by `shardwise profile --modules` as a user would, and what must hold of them: at
least 95% of the time of its kernels belongs to a module or a phase of the step, and what was sent is what was planned.

Needs PyTorch and this package alone; the folders are read by `shardwise trace`, here or elsewhere. The first run is small enough
to be kept as test data (`tests/trace/data`).

    python benchmarks/gpu/profile_runs.py --output FOLDER [--only NAME …] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from shapes import need_gpu

from shardwise.plan.trainer.traffic import traffic
from shardwise.run import read_run

SMALL = dict(layers=2, hidden=1024, heads=16, kv_heads=8, ffn=2816, vocab=32000)
MIDDLE = dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256)
MIXTURE = SMALL | dict(layers=8, experts=8, experts_per_token=2, expert_ffn=1408, dense_layers=1)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    # model, layout, train, steps to record
    "small": (SMALL, {}, dict(seq_len=1024, global_batch=8, microbatch=8), 2),
    "middle": (MIDDLE, {}, dict(seq_len=2048, global_batch=8, microbatch=4), 3),
    "middle-full": (MIDDLE, dict(recompute="full"), dict(seq_len=2048, global_batch=8, microbatch=4), 3),
    "middle-compile": (MIDDLE, {}, dict(seq_len=2048, global_batch=8, microbatch=4, compile=True), 3),
    "mixture": (MIXTURE, {}, dict(seq_len=1024, global_batch=8, microbatch=4), 3),
    "shared": (SMALL, dict(tensor=2), dict(seq_len=512, global_batch=4, microbatch=2, backend="gloo"), 2),  # on one GPU
}
ALLOWED = 0.05


def words_of(name: str, device: str) -> list[str]:
    """A run as overrides of an empty one."""
    model, layout, train, _ = RUNS[name]
    train = dict(dtype="bfloat16", device=device) | train
    sections = dict(model=model, layout=layout, train=train)
    return [
        f"--{section}.{key}={json.dumps(value)}" for section, keys in sections.items() for key, value in keys.items()
    ]


def record(name: str, folder: Path, device: str) -> None:
    """Run the verb."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    empty = folder.parent / f"{name}.toml"
    empty.write_text(f'name = "{name}"\n')
    command = [sys.executable, "-m", "shardwise", "profile", str(empty), "--out", str(folder), "--modules"]
    subprocess.run([*command, "--steps", str(RUNS[name][3]), *words_of(name, device)], check=True)


def unlabelled(folder: Path) -> float:
    """The share of kernels' time that no label and no forward pass explains, on the worst rank."""
    shares = []
    for rows in json.loads((folder / "modules.json").read_text())["ranks"]:
        seconds = {row["module"]: sum(row["seconds"].values()) for row in rows}
        whole = sum(value for name, value in seconds.items() if name == "model" or name.startswith("("))
        shares.append(seconds.get("(unlabelled)", 0.0) / whole)
    return max(shares)


def as_planned(folder: Path) -> bool:
    """Whether every rank sent what the plan says, axis by axis."""
    run = read_run(folder / "run.toml", [])
    described = json.loads((folder / "profile.json").read_text())
    for rank, sent in enumerate(described["traffic"]):
        counted = {(each["axis"], each["collective"]): Fraction(each["bytes"]) for each in sent}
        planned = {
            (axis, kind): described["steps"] * Fraction(size)
            for axis, kinds in traffic(run, rank).bytes.items()
            for kind, size in kinds.items()
            if size
        }
        if counted != planned:
            return False
    return True


def main() -> int:
    """Record them and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpu()
    good = True
    for name in args.only:
        folder = args.output / name
        record(name, folder, args.device)
        share, planned = unlabelled(folder), as_planned(folder)
        size = sum(path.stat().st_size for path in (folder / "ranks").iterdir())
        good = good and share <= ALLOWED and planned
        print(f"{name}: {share:.2%} of kernels' time unlabelled (at most {ALLOWED:.0%}), traffic "
              f"{'as planned' if planned else 'NOT as planned'}, traces {size / 1e3:,.0f} kB", flush=True)  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
