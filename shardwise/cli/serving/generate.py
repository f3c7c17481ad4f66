"""`shardwise generate`: generates text from a checkpoint."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from shardwise.run import UserError

HELP = "Continue one or several prompts with a checkpoint, or with the newest checkpoint of a run folder."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", metavar="CHECKPOINT", type=Path, help="a checkpoint or a run folder")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="adapters to merge: a folder of peft, or the run that trained them"
    )
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=100, help="most new tokens per prompt (100)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy, always the likeliest token (1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest tokens that add up to p")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="sample among tokens at least p times as likely as the likeliest"
    )
    parser.add_argument("--stop", action="append", default=[], help="stop at this text; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="compute dtype (default: the run's)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Generate and print."""
    limits = (
        ("--max-tokens", args.max_tokens, 1 <= args.max_tokens < 2**31, "at least 1 and below 2^31"),
        ("--temperature", args.temperature, args.temperature >= 0, "at least 0"),
        ("--top-k", args.top_k, 0 <= args.top_k < 2**31, "at least 0 and below 2^31"),
        ("--top-p", args.top_p, 0 < args.top_p <= 1, "above 0 and at most 1"),
        ("--min-p", args.min_p, 0 <= args.min_p <= 1, "between 0 and 1"),
    )
    mistakes = [f"{option}: {value} must be {limit}" for option, value, good, limit in limits if not good]
    if "" in args.stop:
        mistakes.append("--stop: an empty text would end each sample before it begins")
    if mistakes:
        raise UserError(*mistakes)

    from dataclasses import replace

    from shardwise.checkpoint.folder import checkpoint_folder
    from shardwise.checkpoint.format import RUN_FILE
    from shardwise.checkpoint.huggingface.peft import adapted
    from shardwise.cli.machinery.ranks import engine_here, start_ranks
    from shardwise.data.tokenizer import load_tokenizer
    from shardwise.run import read_served
    from shardwise.serve.generate import continue_prompts, encode_prompt, ends_of
    from shardwise.serve.request import Sampling

    folder = checkpoint_folder(args.run)
    tokenizer = load_tokenizer(folder)
    prompts = [encode_prompt(tokenizer, prompt) for prompt in args.prompt]
    if not all(prompts):
        raise UserError("an empty prompt has no last token to continue; give at least one character")
    run = read_served(folder / RUN_FILE, args.overrides)
    longest = max(map(len, prompts)) + args.max_tokens
    if run.model.position == "learned" and longest > run.model.max_positions:
        raise UserError(
            f"a prompt of {longest - args.max_tokens} tokens and {args.max_tokens} new ones exceed the model's "
            f"{run.model.max_positions} learned positions; "
            f"ask for at most {max(0, run.model.max_positions - longest + args.max_tokens)}"
        )
    run = replace(
        run,
        model=replace(run.model, max_positions=max(longest, run.model.max_positions)),
        train=replace(run.train, dtype=args.dtype or run.train.dtype, device=args.device),
        serve=replace(run.serve, max_sequences=min(len(prompts), run.serve.max_sequences)),
    )
    code = start_ranks(run, args)
    if code is not None:
        return code
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, seed=args.seed)
    start = time.perf_counter()
    samples, count = [], 0
    with adapted(folder, args.adapter) as weights, engine_here(weights, run, longest) as engine:
        if engine is None:
            return 0
        ends = ends_of(folder, tokenizer)
        texts = continue_prompts(engine, prompts, args.max_tokens, sampling, tokenizer, args.stop, ends)
        for prompt, made in zip(args.prompt, texts, strict=True):
            samples.append(dict(prompt=prompt, text=made.text, tokens=made.tokens, ended_by=made.ended_by))
            count += len(made.tokens)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps(dict(checkpoint=str(folder), samples=samples, seconds=seconds, tokens_per_s=count / seconds)))
    else:
        print("\n\n".join(str(s["prompt"]) + str(s["text"]) for s in samples))
    return 0
