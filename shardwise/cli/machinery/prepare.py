"""`shardwise data prepare`, which does a recipe, and `shardwise data fate`, which says what became of a document."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.data.prepare.fates import Fate
    from shardwise.data.prepare.prepare import Progress

SECONDS_BETWEEN_LINES = 10.0


def add_prepare(verbs: Any) -> None:
    """The arguments of both."""
    prepare = verbs.add_parser(
        "prepare",
        help="read, filter and deduplicate raw files by a recipe, into token sets",
        description="Do a recipe: read JSONL, Parquet, WARC and text, compressed or not; extract, filter, deduplicate, mask; write "
        "the documents that are left, a token set of each source, statistics, and the fate of every document. After an "
        "interruption the same command goes on. The result does not depend on the executor or the number of workers.",
    )
    prepare.add_argument("recipe", metavar="RECIPE.toml", help="sources, steps and tokenizer")
    prepare.add_argument(
        "--out", required=True, metavar="DIR", help="folder for everything; new, empty, or of the same recipe"
    )
    prepare.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="processes of this machine (default), or Ray's workers",
    )
    prepare.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes or workers (default: one for each core)"
    )
    prepare.add_argument("--restart", action="store_true", help="discard what the folder holds of an earlier recipe")
    prepare.add_argument("--json", action="store_true", help="print the statistics as JSON")

    fate = verbs.add_parser(
        "fate",
        help="what became of documents of a prepared corpus",
        description="What became of a document: kept, changed by which steps, or removed by which, why, and in favour of "
        "which other.",
    )
    fate.add_argument("folder", metavar="DIR", help="the folder of `shardwise data prepare`")
    fate.add_argument("documents", nargs="*", metavar="FILE[:PLACE]", help="documents, or files of which all are told")
    fate.add_argument(
        "--step", default="", metavar="KIND", help="those that ended at a step; `kept` for those that stay, `read`"
    )
    fate.add_argument("--reason", default="", metavar="WORDS", help="those whose reason contains the words")
    fate.add_argument("--limit", type=int, default=20, metavar="N", help="the first N (20)")
    fate.add_argument("--json", action="store_true", help="print as JSON, a document a line")


def execute_prepare(args: argparse.Namespace) -> int:
    from shardwise.data.prepare.prepare import prepare
    from shardwise.data.prepare.recipe import read_recipe

    recipe = read_recipe(args.recipe)
    out = Path(args.out)
    found = prepare(
        recipe,
        Path(args.recipe).resolve().parent,
        out,
        executor=args.executor,
        workers=args.workers,
        restart=args.restart,
        progress=_log(),
    )
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print("\n".join(_lines(found, out)))
    return 0


def _log() -> Callable[[Progress], None]:
    """A line where a stage begins, and now and then."""
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
            lines.append(f"  {reason:44.44}{entry['documents']:>0,}".rstrip())
        if len(step["reasons"]) > 5:
            lines.append(f"  and {len(step['reasons']) - 5} more reasons")
    lines.append(f"kept {found['kept']:,} of {found['documents']:,} documents, {found['characters_kept']:,} characters")
    for name, made in found["sets"].items():
        lines.append(f"{name}: {made['documents']:,} documents, {made['tokens']:,} tokens in {out}/tokens/{name}")
    lines.append(
        f"to train on it: the [data] of {out}/data.toml; what became of a document: shardwise data fate {out} FILE:PLACE"
    )
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
