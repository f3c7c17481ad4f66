"""`shardwise data`: builds token shards from text or conversations in files, JSONL or Parquet, shows the content of a set, and
stores the scores of a reference or a teacher beside one. `cli/files/prepare.py` prepares raw files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from shardwise.run.problems import Problem, UserError, counted

if TYPE_CHECKING:
    from shardwise.data.build import Progress, Summary
    from shardwise.data.chat.job import ChatOptions
    from shardwise.data.shards import TokenSet

HELP = """Turn text, JSONL or Parquet into token shards, and show their content."""

_EXCERPT = 200
SECONDS_BETWEEN_LINES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="data_verb", metavar="VERB", required=True)

    build = verbs.add_parser(
        "build",
        help="tokenise files or folders into a set",
        description="Tokenise text (.txt, .md, .rst, or any file named), JSONL and Parquet files, and "
        "folders of them, into a folder that a run's data.sets can name; text and JSONL may be gzipped. "
        "After an interruption the same command resumes. A text file is one document; a long one is "
        "tokenised in parts, split at line ends.",
    )
    build.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, or a folder to search for files")
    build.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the set; new, empty, or of the same build"
    )
    build.add_argument(
        "--tokenizer",
        default="byte",
        metavar="byte|PATH",
        help="raw bytes (default), a tokenizer.json, or a folder with one",
    )
    build.add_argument(
        "--end", default="", metavar="TOKEN", help="the token that ends a document, if its name is unusual"
    )
    build.add_argument(
        "--field", default="text", help="JSONL field or Parquet column that holds the text (default: text)"
    )
    build.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: one for each core)")
    build.add_argument("--shard-tokens", type=int, default=2**29, metavar="N", help="tokens in a shard (default: 2^29)")
    build.add_argument("--restart", action="store_true", help="discard an earlier build in the folder")
    build.add_argument("--json", action="store_true", help="print the summary as JSON")
    chat = build.add_argument_group("conversations")
    chat.add_argument(
        "--chat",
        action="store_true",
        help="rows are conversations, and only the assistant's words are learned: messages (OpenAI), conversations (ShareGPT), "
        "instruction and output (Alpaca), prompt and completion, chosen and rejected, prompt with completion and label, or "
        "prompts alone",
    )
    chat.add_argument(
        "--kind",
        choices=("chat", "pairs", "labels", "prompts"),
        help="kind of the rows (default: by the fields of the first row)",
    )
    chat.add_argument("--chat-template", metavar="FILE", help="Jinja template to use instead of the tokenizer's")
    chat.add_argument(
        "--template-name", default="", metavar="NAME", help="name of the template, if the tokenizer has several"
    )
    chat.add_argument(
        "--learn",
        choices=("all", "last"),
        default="all",
        help="learn all answers of a conversation (default), or only the last",
    )
    chat.add_argument(
        "--max-tokens",
        type=int,
        default=0,
        metavar="N",
        help="cut the end off longer documents, and skip longer prompts (default: no limit; a run cuts at its train.seq_len)",
    )
    chat.add_argument(
        "--samples",
        type=int,
        default=3,
        metavar="N",
        help="documents to show on a terminal, with learned tokens in colour (3)",
    )

    from shardwise.cli.files.prepare import add_prepare

    add_prepare(verbs)
    show = verbs.add_parser(
        "show", help="show the content of a set", description="Show the content of a token set, with its first lines."
    )
    show.add_argument("folder", metavar="DIR", help="a folder made by `shardwise data build`")
    show.add_argument("--samples", type=int, default=3, metavar="N", help="for conversations: documents to show (3)")
    show.add_argument("--json", action="store_true", help="print as JSON")

    score = verbs.add_parser(
        "score",
        help="score the sets of a run with its reference or teacher, and write the scores beside them",
        description="Run the reference (dpo: the log-probability of every learned token) or the teacher (distill: the likeliest "
        "tokens) of a run over its sets, and write the scores beside them, in scores-reference or scores-teacher. With "
        "objective.stored = true the run reads these and needs no second network. Starts several ranks as `train` does.",
    )
    score.add_argument("run", help="the run, a TOML file; override it with --section.key=value")


def execute(args: argparse.Namespace) -> int:
    from shardwise.cli.files.prepare import execute_fate, execute_prepare

    verbs = {"build": _build, "show": _show, "prepare": execute_prepare, "fate": execute_fate, "score": _score}
    return verbs[args.data_verb](args)


def _build(args: argparse.Namespace) -> int:
    from shardwise.data.build import build

    chat = _chat_options(args)
    with progress_on(sys.stderr) as progress:
        summary = build(
            args.inputs,
            args.out,
            tokenizer=args.tokenizer,
            end=args.end,
            field=args.field,
            workers=args.workers,
            shard_tokens=args.shard_tokens,
            restart=args.restart,
            progress=progress,
            chat=chat,
        )
    if args.json:
        print(json.dumps(_summary(summary)))
    else:
        _print_summary(summary)
        if summary.index.marked:
            from shardwise.cli.files.conversations import show_samples
            from shardwise.data.shards import TokenSet

            show_samples(TokenSet.open(summary.folder), args.samples)
    return 0


def _chat_options(args: argparse.Namespace) -> ChatOptions | None:
    given = {
        "--kind": args.kind,
        "--chat-template": args.chat_template,
        "--template-name": args.template_name,
        "--max-tokens": args.max_tokens,
        "--learn": args.learn != "all",
    }
    if not args.chat:
        problems = [Problem("is for conversations: give --chat too", name) for name, value in given.items() if value]
        if problems:
            raise UserError(*problems)
        return None
    from shardwise.data.chat.job import ChatOptions

    return ChatOptions(args.kind, args.chat_template, args.template_name, args.learn, args.max_tokens)


def _summary(summary: Summary) -> dict[str, Any]:
    index = summary.index
    more: dict[str, Any] = {"empty_documents": index.skipped}
    if index.marked:
        from shardwise.cli.files.conversations import counts, skipped_rows

        more = counts(index) | {"skipped_rows": skipped_rows(summary.folder, 20)}
    return {
        "folder": str(summary.folder),
        "documents": index.documents,
        **more,
        "tokens": index.tokens,
        "text_bytes": index.text_bytes,
        "bytes_per_token": round(index.text_bytes / index.tokens, 4),
        "dtype": index.dtype,
        "shards": len(index.shards),
        "seconds": round(summary.seconds, 3),
        "units": summary.units,
        "units_resumed": summary.resumed,
        "already_built": summary.already,
        "fingerprint": index.fingerprint,
    }


def _print_summary(summary: Summary) -> None:
    index = summary.index
    if summary.already:
        print(f"{summary.folder} is already built; nothing was done")
    skipped = f" ({index.skipped:,} empty ones left out)" if index.skipped else ""
    if index.marked:
        from shardwise.cli.files.conversations import print_counts

        print_counts(index, summary.folder)
    else:
        print(f"documents        {index.documents:,}{skipped}")
    print(f"tokens           {index.tokens:,} as {index.dtype}, in {counted(len(index.shards), 'shard')}")
    print(f"text             {megabytes(index.text_bytes)}, {index.text_bytes / index.tokens:.2f} bytes a token")
    if not summary.already:
        resumed = f", {summary.resumed} of {summary.units} units done earlier" if summary.resumed else ""
        print(f"time             {summary.seconds:.1f} s{resumed}")
    print(f"to train on it   --data.sets={summary.folder}")


@contextmanager
def progress_on(stream: TextIO) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on a terminal, an occasional line in a log."""
    if not stream.isatty():
        yield _log_lines(stream)
        return
    from rich import progress as rich
    from rich.console import Console

    way = (rich.BarColumn(), rich.TaskProgressColumn(), rich.DownloadColumn())
    columns = (rich.TextColumn("tokenising"), *way, rich.TextColumn("{task.fields[speed]}"), rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=None, speed="")

        def update(now: Progress) -> None:
            speed = f"{now.tokens / max(now.seconds, 1e-3):,.0f} tokens/s"
            bar.update(task, total=now.total, completed=now.done, speed=speed)

        yield update


def _log_lines(stream: TextIO) -> Callable[[Progress], None]:
    from shardwise.report.words import clock

    last = 0.0

    def update(now: Progress) -> None:
        nonlocal last
        if now.seconds - last < SECONDS_BETWEEN_LINES:
            return
        last = now.seconds
        speed = (now.done - now.before) / now.seconds
        left = f", {clock((now.total - now.done) / speed)} left" if speed > 0 else ""
        share = now.done / now.total if now.total else 1.0
        way = f"{share:5.1%}  {megabytes(now.done)} of {megabytes(now.total)}"
        print(f"{way}, {now.tokens / now.seconds:,.0f} tokens/s{left}", file=stream, flush=True)

    return update


def megabytes(count: float) -> str:
    """A number of bytes in decimal units, as usual for text: 12.3 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def _show(args: argparse.Namespace) -> int:
    from shardwise.data.shards import TokenSet

    tokens = TokenSet.open(args.folder)
    excerpt = tokens.tokenizer().decode(tokens.read(0, min(_EXCERPT, tokens.tokens)).tolist())
    if args.json:
        print(json.dumps(_holdings(tokens, excerpt)))
        return 0
    index = tokens.index
    if index.marked:
        from shardwise.cli.files.conversations import print_counts, show_samples

        print_counts(index, tokens.folder)
        print(f"tokens           {index.tokens:,} as {index.dtype}, in {counted(len(index.shards), 'shard')}")
        print(f"fingerprint      {index.fingerprint}")
        show_samples(tokens, args.samples)
        return 0
    print(f"documents    {index.documents:,}" + (f" ({index.skipped:,} empty ones left out)" if index.skipped else ""))
    print(f"tokens       {index.tokens:,} as {index.dtype}, in {counted(len(index.shards), 'shard')}")
    made = index.tokenizer
    print(f"tokenizer    {made['kind']}, {made['vocab']:,} tokens, {made['end']} ends a document")
    print(f"text         {index.text_bytes / max(index.tokens, 1):.2f} bytes a token")
    print(f"source       {', '.join(index.source)}")
    print(f"fingerprint  {index.fingerprint}")
    print(f"begins\n{excerpt}")
    return 0


def _holdings(tokens: TokenSet, excerpt: str) -> dict[str, Any]:
    index = tokens.index
    more: dict[str, Any] = {"empty_documents": index.skipped}
    if index.marked:
        from shardwise.cli.files.conversations import counts

        more = counts(index)
    return {
        "folder": str(tokens.folder),
        "tokens": index.tokens,
        "documents": index.documents,
        **more,
        "text_bytes": index.text_bytes,
        "dtype": index.dtype,
        "shards": [{"file": name, "tokens": count} for name, count in index.shards],
        "tokenizer": index.tokenizer,
        "source": list(index.source),
        "fingerprint": index.fingerprint,
        "excerpt": excerpt,
    }


def _score(args: argparse.Namespace) -> int:
    """Store the log-probabilities of a reference or a teacher, on as many ranks as the run's layout needs."""
    from shardwise.cli.machinery.ranks import start_here, words_of
    from shardwise.hardware.chips import unknown_chip
    from shardwise.run import read_run
    from shardwise.train.processes import launch
    from shardwise.train.processes.environment import rank_environment

    run = launch.resolve_layout(read_run(args.run, args.overrides, (unknown_chip,)), args.overrides)
    from shardwise.train.batches.score import check_scoring, score

    environment = rank_environment(os.environ)
    launch.check_here(run, environment)
    launch.check_gpus(run)
    check_scoring(run)
    if environment is None and run.layout.world > 1:
        return start_here(words_of(args), run.layout.world)
    if environment is not None:
        launch.join(environment, run)
    try:
        score(run, _say)
    finally:
        launch.leave()
    return 0


def _say(text: str) -> None:
    """Show progress on one line of a terminal; in a log, print only what is done."""
    ends = not text.endswith(" rows")
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\n" if ends else "", file=sys.stderr, flush=True)
    elif ends:
        print(text, flush=True)
