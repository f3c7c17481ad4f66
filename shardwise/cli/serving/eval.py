"""`shardwise eval`: measures the loss on data sets, and the fraction of questions that a checkpoint answers correctly."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.cli.machinery.options import new_file, write_file
from shardwise.run.problems import Problem, UserError

HELP = """Measure loss and perplexity on data sets, and accuracy on questions, with a checkpoint or the newest one of a run
folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint or a run folder")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="DIR",
        help="a set made by `shardwise data build`; may be repeated",
    )
    parser.add_argument(
        "--tasks",
        action="append",
        default=[],
        metavar="FILE",
        help="JSONL of questions with an answer to generate, or with choices to score by their log-likelihood",
    )
    parser.add_argument(
        "--sequence",
        type=int,
        default=0,
        metavar="N",
        help="tokens in a row (default: train.seq_len); of a text, fewer than a row at its end are left out",
    )
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="use only N rows of each set, evenly spaced")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="most tokens of a generated answer (64)"
    )
    parser.add_argument("--chat", action="store_true", help="apply the checkpoint's chat template to the questions")
    parser.add_argument(
        "--answers", type=new_file, metavar="FILE", help="write the model's answers, one line per question"
    )
    parser.add_argument(
        "--dtype", choices=("float64", "float32", "bfloat16", "float16"), help="compute dtype (default: the run's)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    _check(args)
    from shardwise.checkpoint.folder import checkpoint_folder
    from shardwise.checkpoint.format import RUN_FILE
    from shardwise.run import read_run

    folder = checkpoint_folder(args.checkpoint)
    run = read_run(folder / RUN_FILE)
    run = replace(run, train=replace(run.train, dtype=args.dtype or run.train.dtype, device=args.device))
    sets = _losses(args, folder, run) if args.sets else []
    tasks = _tasks(args, folder, run) if args.tasks else []
    if args.json:
        # The figures of all sets together are at the top level, where scripts look for them.
        each_finite = [{key: _finite(value) for key, value in each.items()} for each in sets]
        print(json.dumps({"checkpoint": str(folder), **_together(sets), "sets": each_finite, "tasks": tasks}))
        return 0
    for each in sets:
        print(f"{each['set']}")
        print(f"  loss        {each['loss']:.4f}")
        print(f"  perplexity  {each['perplexity']:.4g}")
        print(f"  tokens      {each['tokens']:,} in {each['rows']:,} rows")
    for each in tasks:
        print(f"{each['tasks']}")
        for name in ("exact_match", "acc", "acc_norm"):
            if name in each:
                error = each[f"{name}_stderr"]
                print(f"  {name:<12}{each[name]:.4f}" + (f" ± {error:.4f}" if error is not None else ""))
        print(f"  questions   {each['questions']:,}")
        if each["cut"]:
            print(
                f"  cut         {each['cut']:,}: longer than the model's context, which saw their ends; see --sequence"
            )
    return 0


def _check(args: argparse.Namespace) -> None:
    problems = []
    if not args.sets and not args.tasks:
        problems.append(Problem("name what to evaluate: --set DIR, --tasks FILE, or both"))
    for name in ("sequence", "rows"):
        if getattr(args, name) < 0:
            problems.append(Problem(f"{getattr(args, name)} must be at least 1", f"--{name}"))
    if args.max_tokens < 1:
        problems.append(Problem(f"{args.max_tokens} must be at least 1", "--max-tokens"))
    problems += [Problem("is for --tasks", name) for name in ("--answers",) if args.answers and not args.tasks]
    if problems:
        raise UserError(*problems)


def _losses(args: argparse.Namespace, folder: Path, run: Any) -> list[dict[str, Any]]:
    import torch

    from shardwise.checkpoint.weights import load_model
    from shardwise.data.shards import TokenSet
    from shardwise.evaluate.loss import set_loss
    from shardwise.model.device import choose_device

    opened = [TokenSet.open(name) for name in args.sets]
    length = args.sequence or run.train.seq_len
    if run.model.position == "learned" and length > run.model.max_positions:
        raise UserError(Problem(f"{length} exceeds the model's {run.model.max_positions} positions", "--sequence"))
    dtype = getattr(torch, run.train.dtype)
    model, _ = load_model(folder, dtype, choose_device(run.train.device))
    model.dtype = dtype
    found = []
    for name, tokens in zip(args.sets, opened, strict=True):
        made = set_loss(model, run, tokens, length, args.rows)
        figures = {"loss": made.loss, "perplexity": made.perplexity, "tokens": made.tokens, "rows": made.rows}
        found.append({"set": name, **figures})
    return found


def _together(sets: list[dict[str, Any]]) -> dict[str, Any]:
    if not sets:
        return {}
    tokens = sum(each["tokens"] for each in sets)
    loss = math.fsum(each["loss"] * each["tokens"] for each in sets) / tokens
    return {"loss": _finite(loss), "perplexity": math.exp(loss) if loss < 700 else None, "tokens": tokens}


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity, the loss of a model that diverged: they are null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tasks(args: argparse.Namespace, folder: Path, run: Any) -> list[dict[str, Any]]:
    from shardwise.data.chat.template import load_template
    from shardwise.evaluate.answering import engine_answerer
    from shardwise.evaluate.tasks import read_questions, score

    files = [(name, read_questions(Path(name))) for name in args.tasks]
    answerer = engine_answerer(folder, run, args.sequence)
    template = load_template(folder, answerer.tokenizer) if args.chat else None
    found, said = [], []
    for name, questions in files:
        made = score(answerer, questions, args.max_tokens, template)
        figures = {key: None if value != value else value for key, value in made.as_dict().items()}
        found.append({"tasks": name, **figures})
        said += [
            {"tasks": name, "question": each.text, **own} for each, own in zip(questions, made.answers, strict=True)
        ]
    if args.answers:
        write_file(args.answers, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in said).encode())
    return found
