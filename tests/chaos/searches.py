"""The search against every layout there is, on many drawn small jobs: what `tests/plan/test_search_all.py` holds of a few.

    python tests/chaos/searches.py [--count 200] [--seed 1] [--at-once 2] [--only N]

A job has up to 64 devices and some hundred layouts (`tests/plan/all_layouts.py`). All are planned; the best found must be the best
there is, every point of the Pareto front must be found, and every row of the ranking must be a run that plans as shown. Only what
does not hold is printed, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "plan")]


def one(seed: int, number: int) -> str:
    """What is wrong with the search of a job; empty where nothing is."""
    from test_search_all import hold

    try:
        hold(number, seed)
    except BaseException:  # an assertion, or pytest's own exception for a job that should have been refused
        return f"python tests/chaos/searches.py --seed {seed} --only {number}:\n{traceback.format_exc()}"
    return ""


def main() -> int:
    """The whole campaign; exit code 0 when nothing better is missing anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="the jobs of these numbers")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    numbers = list(range(args.count)) if args.only is None else args.only
    wrong = 0
    with ProcessPoolExecutor(args.at_once, multiprocessing.get_context("spawn")) as pool:
        for each in as_completed([pool.submit(one, args.seed, number) for number in numbers]):
            if said := each.result():
                wrong += 1
                print(said, flush=True)
    print(f"{len(numbers) - wrong} passed, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
