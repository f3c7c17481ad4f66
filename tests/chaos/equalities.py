"""Every objective and every adapter on each axis, every pair of axes and drawn layouts of up to eight ranks, experts included: each
must compute what one process computes, to 1e-9 in float64, and do what its plan says, to the last operation, message and byte.

    python tests/chaos/equalities.py [--what objectives adapters grpo resumes] [--count N] [--draws 40] [--seed 1] [--at-once 2]
                                     [--part I/N] [--results-only] [--seconds S] [--out FILE] [--only CASE …]

`grpo` runs whole rounds of answers, rewards and steps with every variant and adapter; `resumes` stops each objective and adapter
on a drawn layout and takes it up again: on the same layout bit for bit, on another as one process. Only what is wrong is printed,
with the command that repeats it. `--out` records each case (`recorded.py`), and one that the file has is not compared again.
`--results-only` leaves the plan out, which takes half the time; `--part 2/3` is the second of three machines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked, which a GPU's driver does not survive
os.environ["OMP_NUM_THREADS"] = "1"  # the one process beside others of its kind
HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path[:0] = [
    str(each) for each in (HERE.parents[1], TESTS, *(TESTS / n for n in ("parallel", "checkpoint", "tune")))
]

import cases  # noqa: E402
import layouts  # noqa: E402
from parallel_pool import RankPool  # noqa: E402
from recorded import Key, Recorded  # noqa: E402

from shardwise.run import Run, UserError  # noqa: E402

OBJECTIVES = ("sft", "dpo", "dpo ipo", "dpo hinge", "kto", "orpo", "simpo", "reward", *cases.OBJECTIVES)
ADAPTERS = tuple(name for name in cases.ADAPTERS if name)
GRPO: dict[str, dict[str, Any]] = {
    "grpo": dict(iterations=2),
    "dr_grpo": dict(variant="dr_grpo", minibatches=2),
    "dapo": dict(variant="dapo", filter_rounds=2, iterations=2),
    "asynchronous": dict(asynchronous=True),
}
WHAT = ("objectives", "adapters", "grpo", "resumes")
ONE_AND_TWO = [
    *layouts.ONE_AXIS.values(),
    *(layouts.ONE_AXIS[one] | layouts.ONE_AXIS[other] for one, other in itertools.combinations(layouts.AXES, 2)),
]
"""Each axis, and every pair."""


PATIENCE = 240.0
"""Seconds after which a rank that says nothing hangs: a campaign has a limit of its own, and goes on with the other cases."""
REFUSED = f"{UserError.__module__}.{UserError.__qualname__}: "
"""Before what a rank says of a run that is not allowed."""
RESULTS = "results"
"""Behind a case of which only the results are compared."""
JOB = ("optimizer", "adapter", "objective")
"""What two layouts of one job have in common, of the keys for training."""


class Case(NamedTuple):
    """One comparison; for `resumes` also the layout on which it is taken up again."""

    what: str
    subject: str
    drawn: layouts.Drawn
    then: layouts.Drawn | None = None


def every_case(what: tuple[str, ...], seed: int, draws: int) -> list[tuple[str, str, int]]:
    """All of a campaign: of what, which objective or adapter, and the number of its layout."""
    subjects = dict(objectives=OBJECTIVES, adapters=ADAPTERS, grpo=tuple(GRPO), resumes=(*OBJECTIVES, *ADAPTERS))
    counts = {each: len(ONE_AND_TWO) + draws for each in WHAT} | dict(resumes=max(1, draws // 10))
    found = [(each, subject, n) for each in what for subject in subjects[each] for n in range(counts[each])]
    random.Random(seed).shuffle(found)  # so that the first of them are some of everything
    return found


def drawn_case(seed: int, what: str, subject: str, number: int) -> Case:
    """One of them, which a seed decides."""
    generator = random.Random(f"{seed} {what} {subject} {number}")
    if what == "resumes":
        first = _drawn(generator, _keys(subject), world=4)
        while not _four_layers(first):
            first = _drawn(generator, _keys(subject), world=4)
        while True:  # the same job on another layout
            _, layout, train = layouts.draw(generator, 4, axes=1)
            second = (first[0], layout, train | {key: value for key, value in first[2].items() if key in JOB})
            if second[2].get("global_batch") == first[2].get("global_batch") and _four_layers(second):
                return Case(what, subject, first, second)
    if number < len(ONE_AND_TWO):
        layout = dict(ONE_AND_TWO[number])
        if what == "grpo":
            return Case(what, subject, ("mixture" if "expert" in layout else "dense", layout, {}))
        keys = _keys(subject)
        return Case(what, subject, (_width("mixture", keys, layout), layout, keys))
    if what == "grpo":
        return Case(what, subject, _drawn_grpo(generator, subject))
    return Case(what, subject, _drawn(generator, _keys(subject), world=8))


def _keys(subject: str) -> dict[str, Any]:
    """What a run has of an objective or an adapter."""
    return dict(adapter=subject) if subject in ADAPTERS else dict(objective=subject)


def _width(model: str, keys: dict[str, Any], layout: dict[str, Any]) -> str:
    """A model of this kind whose rows are whole blocks of 4-bit weights, where it needs them to be."""
    if not keys.get("adapter", "").startswith("qlora"):
        return model if layouts.legal_run(model, layout, keys) else "dense"
    return "wide mixture" if cases.model_of(model).get("experts") else "wide"


def _drawn(generator: random.Random, keys: dict[str, Any], world: int, axes: int = 2) -> layouts.Drawn:
    """A layout that goes with an objective or an adapter; what it goes with is among the keys for training."""
    while True:
        model, layout, train = layouts.draw(generator, world, axes)
        if "adapter" in keys:
            train["optimizer"] = "adamw"
        elif generator.random() < 0.3:  # adapters with any objective
            train |= dict(optimizer="adamw", adapter=generator.choice(layouts.KINDS))
        train |= keys
        if train.get("adapter", "").startswith("qlora"):
            model = " + ".join([_width(model, keys, layout), *model.split(" + ")[1:]])
        if layouts.legal_run(model, layout, train):
            return model, layout, train


def _four_layers(drawn: layouts.Drawn) -> bool:
    """Whether it is legal with four layers, which every pipeline may cut."""
    try:
        run_of(drawn)
    except UserError:
        return False
    return True


def _drawn_grpo(generator: random.Random, subject: str) -> layouts.Drawn:
    """A layout that goes with a GRPO run of eight answers a step."""
    while True:
        sizes = {
            axis: generator.choice([1, 1, 2, 4]) for axis in ("replicate", "shard", "context", "tensor", "pipeline")
        }
        world = 1
        for size in sizes.values():
            world *= size
        if not 2 <= world <= 8:
            continue
        layout: dict[str, Any] = sizes | dict(zero=generator.choice([1, 2, 3]))
        layout["context_method"] = generator.choice(cases.METHODS)
        model = generator.choice(["dense", "mixture"])
        if model == "mixture":
            layout |= dict(expert=generator.choice([1, 2]), expert_tensor=generator.random() < 0.5)
        adapter = generator.choice(["", "", *ADAPTERS])
        if adapter.startswith("qlora"):
            model = "wide mixture" if model == "mixture" else "wide"
        drawn = model, layout, dict(adapter=adapter)
        try:
            _grpo_run(Path(), subject, drawn, layout)
        except UserError:
            continue
        return drawn


def _grpo_run(folder: Path, subject: str, drawn: layouts.Drawn, layout: dict[str, Any]) -> Run:
    """A GRPO run on the task of a folder: the network of a drawn case on any layout."""
    from grpo_runs import grpo_run

    model, own, more = drawn
    network = cases.model_of(model) | dict(layers=max(2, own.get("pipeline", 1)), vocab=260)
    keys = dict(objective=GRPO[subject], adapter=cases.ADAPTERS[more.get("adapter", "")])
    return grpo_run(folder, model=network, layout=layout, train=dict(steps=3, microbatch=1), **keys)


@cache
def ranks() -> RankPool:
    """The ranks of this process, which take one run after another."""
    return RankPool(PATIENCE)


def hold(case: Case, results_only: bool) -> None:
    """Compare; what is wrong is raised."""
    from observed import Observed

    if case.what == "grpo":
        return hold_grpo(case)
    if case.what == "resumes":
        return hold_resume(case)
    observed = Observed(ranks(), *case.drawn)
    if results_only:
        return observed.assert_results_of_one_process()
    observed.assert_begins_as_one_process()
    observed.assert_trains_as_one_process()
    observed.assert_trains_what_is_not_frozen()
    observed.assert_follows_its_schedule()
    observed.assert_computes_and_sends_as_planned()
    observed.assert_messages_are_as_planned()
    observed.assert_holds_what_the_plan_says()
    return None


def hold_grpo(case: Case) -> None:
    """Whole rounds: the same answers, and the same learned from them, with the plan's layouts of one process and of many."""
    from grpo_runs import assert_learns_as_one_process

    def run(layout: dict[str, Any]) -> Run:
        return _grpo_run(task(), case.subject, case.drawn, layout)

    with tempfile.TemporaryDirectory() as folder:
        assert_learns_as_one_process(ranks(), run, case.drawn[1], Path(folder))


@cache
def task() -> Path:
    """The folder of a small task, for all runs of this process."""
    from grpo_runs import make_task

    folder = tempfile.TemporaryDirectory()
    KEPT.append(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        return make_task(Path(folder.name))


KEPT: list[tempfile.TemporaryDirectory[str]] = []


def hold_resume(case: Case) -> None:
    """Some steps, a checkpoint, and the rest: on the same layout to the bit, on another to 1e-9."""
    import checkpoint_cases
    import numpy as np

    assert case.then is not None
    runs = [run_of(drawn) for drawn in (case.drawn, case.then)]
    with tempfile.TemporaryDirectory() as out:
        ranks().run(runs[0].layout.world, checkpoint_cases.train_and_save, runs[0], Path(out), 1)
        unbroken = ranks().run(runs[0].layout.world, cases.train, runs[0])
        for run in runs:
            resumed = ranks().run(run.layout.world, checkpoint_cases.resume_and_train, run, Path(out), 2)
            whole = _whole(unbroken)
            for rank, got in enumerate(resumed):
                if run is runs[0]:
                    assert got["losses"] == unbroken[rank]["losses"][1:], f"losses {got['losses']}"
                np.testing.assert_allclose(got["losses"], unbroken[0]["losses"][1:], rtol=1e-9)
                for name, (where, value) in got["parameters"].items():
                    if run is runs[0]:
                        assert np.array_equal(value, unbroken[rank]["parameters"][name][1]), f"bits of {name}"
                    elif value.size:
                        scale = max(np.abs(whole[name]).max(initial=0), 0.1)
                        assert np.abs(value - whole[name][where]).max() / scale < 1e-9, name


def run_of(drawn: layouts.Drawn) -> Any:
    """A drawn layout as a run of two steps; four layers, which every pipeline may cut."""
    model, layout, train = drawn
    return cases.make_run(model, layout, **dict(layers=4, steps=2) | train)


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole parameters of the ranks' parts."""
    import numpy as np

    found: dict[str, Any] = {}
    for part in parts:
        for name, (where, value) in part["parameters"].items():
            if name not in found:
                ends = [each["parameters"][name][0] for each in parts if name in each["parameters"]]
                most = [max(end[dim].stop or value.shape[dim] for end in ends) for dim in range(value.ndim)]
                found[name] = np.zeros(most, value.dtype)
            found[name][where] = value
    return found


def compare(seed: int, what: str, subject: str, number: int, extent: str = "") -> str:
    """What is wrong with a case, in a line; empty where all is equal, "-" where the run is not allowed."""
    case = drawn_case(seed, what, subject, number)
    try:
        hold(case, results_only=extent == RESULTS)
    except UserError as refused:
        return f"-{refused}"
    except Exception as error:  # a rank's failure is this case's, and the others go on
        lines = [line for line in str(error).splitlines() if line.strip()]
        said = f"{type(error).__name__}: {lines[-1] if lines else error!r}"
        if REFUSED in said:  # what only a rank knows: that its PyTorch is too old for 4 bits on several ranks
            return f"-{said.partition(REFUSED)[2]}"
        again = f"python tests/chaos/equalities.py --seed {seed} --only '{what}/{subject}/{number}'"
        return f"{again}: {said[:600]} ({case.drawn} {case.then or ''})"
    return ""


def outcome(said: str) -> str:
    """What came of a case."""
    return "refused" if said.startswith("-") else "failed" if said else "passed"


def campaign(
    seed: int, chosen: list[Key], at_once: int, seconds: float, out: Path | None = None, again: bool = False
) -> Counter[str]:
    """Compare, so many at a time, until the time is over; counts of what came of them, with what `out` had before. Once more if
    `again` what it had and did not pass."""
    done = Recorded(out, seed)
    had = [case for case in chosen if case in done.said and not (again and done.said[case])]
    met = Counter(f"{case[0]} {outcome(done.said[case])}" for case in had)
    todo, end = [case for case in chosen if case not in set(had)], time.monotonic() + seconds
    pool, running = _pool(at_once), dict[Future[str], Key]()
    while running or (todo and time.monotonic() < end):
        while todo and len(running) < at_once and time.monotonic() < end:
            case = todo.pop(0)
            running[pool.submit(compare, seed, *case)] = case  # type: ignore[arg-type]
        for each in wait(running, return_when=FIRST_COMPLETED).done:
            case = running.pop(each)
            try:
                said = each.result()
            except BrokenProcessPool:  # it was killed, and all its kind with it: the others are compared again
                said, todo = f"{case}: the process that compared it was killed", [*running.values(), *todo]
                pool, running = _pool(at_once), {}
            done.add(case, said)
            met[f"{case[0]} {outcome(said)}"] += 1
            if said:
                print(said, flush=True)
            if not running:
                break
    pool.shutdown()
    if todo:
        met["not compared"] = len(todo)
    return met


def _pool(at_once: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"))


def part_of(text: str) -> slice:
    """I/N: every Nth of all cases, beginning with the Ith."""
    number, _, parts = text.partition("/")
    return slice(int(number) - 1, None, int(parts))


def main() -> int:
    """The campaign; exit code 0 when all is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--count", type=int, help="so many of all cases; some of everything")
    parser.add_argument("--draws", type=int, default=40, help="drawn layouts of each objective and adapter")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing more after so long")
    parser.add_argument("--out", type=Path, metavar="FILE", help="record every case there; skip what it has")
    parser.add_argument("--part", type=part_of, default=slice(None), metavar="I/N", help="one of so many parts of all")
    parser.add_argument("--results-only", action="store_true", help="compare with one process, not with the plan")
    parser.add_argument("--again", action="store_true", help="compare once more what FILE has that did not pass")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="what/subject/number, to repeat what was said")
    args = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # of what PyTorch will change
    found = every_case(tuple(args.what), args.seed, args.draws)[: args.count][args.part]
    if args.only is not None:
        found = [(what, subject, int(number)) for what, subject, number in (one.split("/") for one in args.only)]
    chosen: list[Key] = [(*case, RESULTS) if args.results_only else case for case in found]
    met = campaign(args.seed, chosen, args.at_once, args.seconds, args.out, args.again)
    for name, count in sorted(met.items()):
        print(f"{name}: {count}")
    return 1 if any(name.endswith("failed") for name in met) else 0


if __name__ == "__main__":
    sys.exit(main())
