"""`shardwise data prepare`, which executes a recipe, and `shardwise data fate`, which shows the fate of a document."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.files import write_atomically
from shardwise.run.problems import Problem, UserError

if TYPE_CHECKING:
    from shardwise.data.prepare.fates import Fate
    from shardwise.data.prepare.prepare import Progress
    from shardwise.data.prepare.recipe import Recipe
    from shardwise.launch.submission import Submission

SECONDS_BETWEEN_LINES = 10.0
PAGE = "statistics.html"


def add_prepare(verbs: Any) -> None:
    """Declare the arguments of both."""
    prepare = verbs.add_parser(
        "prepare",
        help="read, filter and deduplicate raw files by a recipe, into token sets",
        description="Execute a recipe: read JSONL, Parquet, WARC and text, compressed or not; extract, filter, deduplicate, mask; "
        "write the remaining documents, a token set for each source, statistics, and the fate of every document. After an "
        "interruption the same command resumes. The result does not depend on the executor or the number of workers.",
    )
    prepare.add_argument("recipe", metavar="RECIPE.toml", help="sources, steps and tokenizer")
    prepare.add_argument(
        "--out", required=True, metavar="DIR", help="folder for everything; new, empty, or of the same recipe"
    )
    prepare.add_argument(
        "--executor",
        choices=("local", "ray", "slurm"),
        default="local",
        help="processes on this machine (default), Ray workers, or submitted Slurm arrays",
    )
    prepare.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes or workers (default: one for each core)"
    )
    prepare.add_argument(
        "--restart", action="store_true", help="discard the results of an earlier recipe in the folder"
    )
    prepare.add_argument(
        "--option", action="append", default=[], metavar="=--WORD", help="Slurm: one more option of sbatch"
    )
    prepare.add_argument("--json", action="store_true", help="print the statistics as JSON")
    # Passed to the tasks of a Slurm array.
    prepare.add_argument("--stage", default="", help=argparse.SUPPRESS)
    prepare.add_argument("--share", default="0/1", help=argparse.SUPPRESS)

    fate = verbs.add_parser(
        "fate",
        help="show the fate of documents in a prepared corpus",
        description="Show the fate of documents: kept, changed by which steps, or removed by which step, why, and in favour of "
        "which other document.",
    )
    fate.add_argument("folder", metavar="DIR", help="the folder of `shardwise data prepare`")
    fate.add_argument(
        "documents", nargs="*", metavar="FILE[:PLACE]", help="documents, or files with all their documents"
    )
    fate.add_argument(
        "--step",
        default="",
        metavar="KIND",
        help="only documents that ended at this step; also `kept`, and `read` for unreadable ones",
    )
    fate.add_argument("--reason", default="", metavar="WORDS", help="only documents whose reason contains these words")
    fate.add_argument("--limit", type=int, default=20, metavar="N", help="show the first N (20)")
    fate.add_argument("--json", action="store_true", help="print JSON, one document per line")


def execute_prepare(args: argparse.Namespace) -> int:
    from shardwise.data.prepare.prepare import prepare
    from shardwise.data.prepare.recipe import read_recipe

    recipe = read_recipe(args.recipe)
    out = Path(args.out)
    if args.stage:
        return _one_stage(args, out)
    if args.executor == "slurm":
        return _submit(args, recipe, out)
    if args.option:
        raise UserError(Problem("is for Slurm: give --executor slurm too", "--option"))
    found = prepare(
        recipe,
        Path(args.recipe).resolve().parent,
        out,
        executor=args.executor,
        workers=args.workers,
        restart=args.restart,
        progress=_log(),
    )
    return _show(args, found, out)


def _show(args: argparse.Namespace, found: dict[str, Any], out: Path) -> int:
    from shardwise.report.html_prepare import preparation_page

    if not (out / PAGE).exists():
        write_atomically(out / PAGE, preparation_page(Path(args.recipe).stem, found).encode("utf-8"))
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print("\n".join(_lines(found, out)))
    return 0


def _one_stage(args: argparse.Namespace, out: Path) -> int:
    """Run one task of a Slurm array: its share of a stage, or the final one."""
    from shardwise.data.prepare.prepare import do_share, finish
    from shardwise.data.prepare.stages import read_plan

    share, _, count = args.share.partition("/")
    if args.stage == "finish":
        return _show(args, finish(read_plan(out), out, args.workers), out)
    do_share(out, args.stage, int(share), int(count))
    return 0


def _submit(args: argparse.Namespace, recipe: Recipe, out: Path) -> int:
    jobs = _submit_stages(args, recipe, out)
    if args.json:
        print(json.dumps({"jobs": [job.id for job in jobs]}))
    elif jobs:
        print(f"submitted {len(jobs)} jobs, each after the one before: {', '.join(job.id for job in jobs)}")
        print("where one fails, the same command submits what is left")
    else:
        print(f"{out} is already prepared; nothing was submitted")
    return 0


def _submit_stages(args: argparse.Namespace, recipe: Recipe, out: Path) -> list[Submission]:
    """Write and submit the recipe as Slurm arrays of `--workers` tasks: a job for each unfinished stage, each after the one before,
    and a final one."""
    from shardwise.data.prepare.prepare import STATISTICS, begin
    from shardwise.data.prepare.stages import WORK, missing
    from shardwise.launch.slurm import TASK, array_script
    from shardwise.launch.submission import FOLDER, submit

    if args.workers < 1:
        raise UserError(Problem("is needed for Slurm: the tasks of each array", "--workers"))
    file = Path(args.recipe).resolve()
    plan = begin(recipe, file.parent, out, args.restart)
    if (out / STATISTICS).exists():
        return []
    command = [sys.executable, "-m", "shardwise", "data", "prepare", str(file), "--out", str(out.resolve())]
    (out / FOLDER).mkdir(exist_ok=True)
    (out / "logs").mkdir(exist_ok=True)
    jobs: list[Submission] = []

    def add(name: str, tasks: int, more: list[str]) -> None:
        words = f"{shlex.join([*command, '--stage', name])} {' '.join(more)}".rstrip()
        path = out / FOLDER / f"{name}.sbatch"
        after = jobs[-1].id if jobs else ""
        script = array_script(f"prepare-{name}", tasks, [words], out, after=after, options=args.option)
        path.write_text(script, encoding="utf-8")
        jobs.append(submit("slurm", path, out, log=str(out.resolve() / "logs" / "slurm-%j-0.out")))

    for stage in plan.stages():
        if left := len(missing(out / WORK, stage)):
            shares = min(args.workers, left)
            add(stage.name, shares, ["--share", f'"{TASK}/{shares}"'])
    add("finish", 1, [])
    return jobs


def _log() -> Callable[[Progress], None]:
    """Log a line when a stage begins, and from time to time."""
    last: list[Any] = ["", 0.0]

    def update(now: Progress) -> None:
        if now.stage != last[0] or now.seconds - last[1] >= SECONDS_BETWEEN_LINES:
            last[:] = [now.stage, now.seconds if now.stage == last[0] else 0.0]
            print(f"{now.stage}: {now.done:,} of {now.tasks:,} tasks", file=sys.stderr, flush=True)

    return update


def _lines(found: dict[str, Any], out: Path) -> list[str]:
    from shardwise.report import words

    lines = [f"{out} is already prepared; nothing was done"] if found["already"] else []
    lines.append(f"{'step':20}{'documents':>14}{'removed':>12}{'share':>8}{'changed':>10}")
    for step in found["steps"]:
        share = words.percent(step["removed"] / step["documents"]) if step["documents"] else words.DASH
        lines.append(f"{step['kind']:20}{step['documents']:>14,}{step['removed']:>12,}{share:>8}{step['changed']:>10,}")
        for reason, entry in islice(step["reasons"].items(), 5):
            shown = reason if len(reason) <= 46 else f"{reason[:45]}…"
            lines.append(f"  {shown:46} {entry['documents']:>11,}")
        if len(step["reasons"]) > 5:
            lines.append(f"  and {len(step['reasons']) - 5} more reasons")
    lines.append(f"kept {found['kept']:,} of {found['documents']:,} documents, {found['characters_kept']:,} characters")
    for name, made in found["sets"].items():
        lines.append(f"{name}: {made['documents']:,} documents, {made['tokens']:,} tokens in {out}/tokens/{name}")
    lines.append(f"reasons with examples: {out}/{PAGE}")
    drawn = (out / "data.toml").exists()
    train = f"to train on it: the [data] of {out}/data.toml" if drawn else "no document is left to train on"
    lines.append(f"{train}; what became of a document: shardwise data fate {out} FILE:PLACE")
    return lines


def execute_fate(args: argparse.Namespace) -> int:
    from shardwise.data.prepare.fates import Fates

    fates = Fates(args.folder)
    if args.documents:
        wanted = set(fates.where(args.step, args.reason)) if args.step or args.reason else None
        rows: Iterator[int] = (
            row for name in args.documents for row in fates.find(name) if wanted is None or row in wanted
        )
    else:
        rows = fates.where(args.step, args.reason)
    for row in islice(rows, args.limit if args.limit > 0 else None):
        fate = fates[row]
        print(json.dumps(fate.__dict__, ensure_ascii=False) if args.json else _told(fate))
    return 0


def _told(fate: Fate) -> str:
    if fate.kept:
        changed = f", changed by {', '.join(fate.changed)}" if fate.changed else ""
        return f"{fate.id}: kept, {fate.characters:,} characters{changed}"
    other = f" ({fate.other})" if fate.other else ""
    return f"{fate.id}: removed by {fate.step}: {fate.reason}{other}"
