"""Drawn runs that mix what a user may combine, each verified: `shardwise verify`'s own comparison on real ranks, or its dry one of
every rank, must find plan and run equal to the last operation, message and byte.

    python tests/chaos/verifications.py [--count 200] [--seed 1] [--at-once 2] [--methods] [--only N] [--out FILE]

A draw (`tests/parallel/layouts.py`) has up to eight ranks and a model with parts that no published one has together: recompute
budgets with several chunks a rank, expert capacity, windows under every context method, latent attention, tied embeddings, Muon,
ZeRO stages, schedules, stages without layers. Parameters in the CPU's memory need a GPU, and are compared dry. With `--methods` a
draw has two or more ways to save memory and traffic (`tests/parallel/methods.py`). Only what differs is printed, with the command
that repeats it. With `--out` the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "parallel")]

import cases  # noqa: E402
import layouts  # noqa: E402
import methods  # noqa: E402
from parallel_pool import RankPool  # noqa: E402
from recorded import Key, Recorded  # noqa: E402

from shardwise.run import Run, UserError  # noqa: E402

AXES_ON = {1: 0, 2: 1, 4: 2, 8: 2}
"""The fewest axes of a draw on up to so many ranks."""
LIMITS = dict(work=0.0, traffic=0.0, memory=0.0)
"""How far plan and run may be apart: nowhere, also in saved activations, for which a user's `verify` allows 1%."""


class Draw(NamedTuple):
    """A run, and whether it is compared dry."""

    model: str
    run: Run
    dry: bool


def draw(seed: int, number: int) -> Draw:
    """One of a seed's runs."""
    generator = random.Random(f"{seed} {number}")
    while True:
        most = generator.choice([1, 2, 4, 4, 8, 8])
        model, layout, train = layouts.draw(generator, most, AXES_ON[most])
        layout["prefetch"] = generator.choice([1, 1, 2])
        train["dtype"] = generator.choice(["float64", "float32", "bfloat16", "bfloat16"])
        train["reduce_dtype"] = generator.choice(["float32", "float32", "bfloat16"])
        train["recheck_every"] = generator.choice([0, 1])
        dry = generator.random() < 0.15
        if dry:
            layout["offload"], train["device"] = True, "cuda"
        try:
            run = cases.make_run(model, layout, **cases.layers_for(layout) | train)
        except UserError:
            continue
        alone = run.layout.replicate == run.layout.world > 1  # DistributedDataParallel needs data
        if not dry or not alone:
            return Draw(model, run, dry)


def draw_methods(seed: int, number: int) -> Draw:
    """One of a seed's runs that save memory and traffic."""
    model, run = methods.draw(random.Random(f"{seed} methods {number}"))
    return Draw(model, run, dry=run.layout.offload)


def on_rank(rank: int, run: Run) -> list[str]:
    """What differs on one rank of real ones."""
    from shardwise.measure.verify import verify_rank

    return _differences(verify_rank(run, steps=1))


def without_data(run: Run) -> list[list[str]]:
    """What differs on each rank, dry."""
    from shardwise.measure.verify import verify_dry

    return [_differences(verify_dry(run, rank)) for rank in range(run.layout.world)]


def _differences(verdict: Any) -> list[str]:
    found = [] if verdict.schedule else ["another schedule"]
    return found + [f"{d.account} {d.name}: planned {d.first:g}, counted {d.second:g}" for d in verdict.beyond(LIMITS)]


@cache
def ranks() -> RankPool:
    """The ranks of this process, which take one run after another."""
    return RankPool()


def verify(seed: int, number: int, saving: bool = False) -> str:
    """What is wrong with a run, in a line; empty where plan and run agree."""
    drawn = draw_methods(seed, number) if saving else draw(seed, number)
    try:
        for again in (True, False):
            found = without_data(drawn.run) if drawn.dry else ranks().run(drawn.run.layout.world, on_rank, drawn.run)
            wrong = [difference for rank in found for difference in rank]
            # On a busy machine a message's buffer may outlive it for a moment.
            if not again or not wrong or not all(one.startswith("memory") for one in wrong):
                break
    except Exception as error:  # a rank's failure is this run's, and the others go on
        lines = [line for line in str(error).splitlines() if line.strip()]
        wrong = [f"{type(error).__name__}: {lines[-1] if lines else error!r}"]
    if not wrong:
        return ""
    what = f"{wrong[0]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else "")
    run = drawn.run
    keys = f"{drawn.model} {_changed(run.layout)} {_changed(run.train)} {_changed(run.memory)}"
    flags = " --methods" if saving else ""
    return f"python tests/chaos/verifications.py --seed {seed}{flags} --only {number}: {what} ({keys})"


def _changed(section: Any) -> dict[str, Any]:
    """The keys of a section that are not at their default."""
    usual = type(section)()
    return {name: value for name, value in vars(section).items() if value != getattr(usual, name)}


def campaign(numbers: list[int], at_once: int, saving: bool, recorded: Recorded) -> list[str]:
    """What is wrong with each of them, so many at a time; those that were recorded are not run again."""
    keys: dict[int, Key] = {number: ("methods" if saving else "all", number) for number in numbers}
    left = [number for number in numbers if keys[number] not in recorded.said]
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(verify, recorded.seed, number, saving): number for number in left}
        for done, each in enumerate(as_completed(running), 1):
            recorded.add(keys[running[each]], each.result())
            if each.result():
                print(each.result(), flush=True)
            print(f"\r{done} of {len(left)}", end="" if done < len(left) else "\n", file=sys.stderr, flush=True)
    return [recorded.said[keys[number]] for number in numbers]


def main() -> int:
    """The whole campaign; exit code 0 when plan and run agree in all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--methods", action="store_true", help="runs that save memory and traffic")
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="N", help="the runs of these numbers, to repeat what was said"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="what was done, to go on with")
    args = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # of what PyTorch will change
    numbers = list(range(args.count)) if args.only is None else args.only
    said = campaign(numbers, args.at_once, args.methods, Recorded(args.out, args.seed))
    wrong = sum(bool(one) for one in said)
    print(f"{len(said) - wrong} passed, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
