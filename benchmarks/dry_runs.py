"""Ranks of jobs larger than any machine at hand, run dry on this one and held against the plan: operations, traffic and memory.

Llama 3 70B on 512 ranks, Llama 3 405B on 16,384 (shard 128 x tensor 8 x pipeline 16), DeepSeek-V3 on 2,048 with experts over
64. Each must agree and take at most 90 seconds.

    python benchmarks/dry_runs.py [--only 70b 405b deepseek]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from shardwise.measure.verify import TOLERANCE, verify_dry
from shardwise.run import run_from_dict

ALLOWED = 90.0
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    # name: model, layout, global batch, rank
    "70b": (dict(preset="llama3-70b"), dict(shard=64, tensor=8), 256, 137),
    "405b": (dict(preset="llama3-405b"), dict(shard=128, tensor=8, pipeline=16), 2048, 9000),
    "deepseek": (dict(preset="deepseek-v3"), dict(shard=128, pipeline=16, expert=64), 2048, 1000),
}


def main() -> int:
    """Run each dry and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    args = parser.parse_args()
    good = True
    for name in args.only:
        model, layout, batch, rank = JOBS[name]
        seq_len = 4096 if name == "deepseek" else 8192
        run = run_from_dict(
            dict(
                model=model,
                layout=layout,
                train=dict(seq_len=seq_len, global_batch=batch, microbatch=1, dtype="bfloat16", device="cpu"),
            )
        )
        start = time.perf_counter()
        verdict = verify_dry(run, rank)
        taken = time.perf_counter() - start
        beyond = verdict.beyond(TOLERANCE)
        agrees = verdict.agrees(TOLERANCE)
        good &= agrees and taken <= ALLOWED
        print(f"{name:<9} rank {rank} of {run.layout.world}: {'agrees' if agrees else 'DIFFERS'} in {taken:.0f} s")
        for each in beyond[:10]:
            print(f"    {each.account} {each.name}: plan {each.first:.6g}, run {each.second:.6g}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
