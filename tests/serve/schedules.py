"""Drawn schedules by the thousand, over all cores: tiny models of all families, random arrivals, chunks, page sizes, preemptions,
prefix hits, forks, aborts and guesses; every answer against the forward pass without a cache, in float64.

python tests/serve/schedules.py --count 10000 --at-once 14 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
AT_A_TIME = 20


def check_some(seed: int, numbers: range) -> tuple[Counter[str], list[tuple[str, str]]]:
    """What was met in schedules of these numbers, and which failed with what."""
    import torch
    from drawn_schedules import check_schedule

    torch.set_num_threads(1)
    met, failed = Counter[str](), []
    for number in numbers:
        name = f"schedules {seed} {number}"
        try:
            drawn = check_schedule(name)
        except Exception:
            failed.append((name, traceback.format_exc(limit=-4)))
            continue
        stats, settings = drawn.stats, drawn.settings
        met["passed"] += 1
        met[f"family {drawn.family}"] += 1
        met[f"guesses {settings.speculate}"] += 1
        met[f"pages of {settings.page_tokens}"] += 1
        met[f"preempted, {settings.preemption}"] += stats.preemptions
        met["tokens found in the prefix cache"] += stats.prefix_hits
        met["requests aborted"] += drawn.aborted
        met["tokens of answers"] += stats.generated_tokens
        met["steps"] += drawn.steps
        met["guesses verified"] += sum(stats.drafted_at)
        met["guesses right"] += sum(stats.accepted_at)
    return met, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    start, met, failed = time.perf_counter(), Counter[str](), []
    parts = [range(n, min(n + AT_A_TIME, args.count)) for n in range(0, args.count, AT_A_TIME)]
    with ProcessPoolExecutor(args.at_once, mp_context=get_context("spawn")) as pool:
        for done, (some, wrong) in enumerate(pool.map(partial(check_some, args.seed), parts), 1):
            met += some
            failed += wrong
            for name, error in wrong:
                print(f"FAILED {name}\n{error}", file=sys.stderr, flush=True)
            if done % 25 == 0:
                print(f"{parts[done - 1].stop:,} of {args.count:,}", file=sys.stderr, flush=True)
    found: dict[str, Any] = dict(
        seed=args.seed, passed=met.pop("passed", 0), failed=[name for name, _ in failed], seconds=time.perf_counter() - start,
        **dict(sorted(met.items())),
    )  # fmt: skip
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in (found | dict(failed=len(failed))).items():
            print(f"{name:34} {value:,.0f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
