"""`shardwise generate`: text from a checkpoint."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from shardwise.run import UserError

HELP = "Continue one or several prompts with a checkpoint, or with the newest checkpoint of a run folder."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint or a run folder")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; several make a batch")
    parser.add_argument("--max-tokens", type=int, default=100, help="maximum of new tokens for each prompt (100)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy, always the likeliest token (1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest tokens that add up to p")
    parser.add_argument("--stop", action="append", default=[], help="end at this text; may be given several times")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument(
        "--no-cache", action="store_true", help="recompute keys and values for each token (slow; a check)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="compute dtype (default: the run's)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Generate and print."""
    mistakes = []
    if args.max_tokens < 1:
        mistakes.append(f"--max-tokens: {args.max_tokens} must be at least 1")
    if not args.temperature >= 0:
        mistakes.append(f"--temperature: {args.temperature} must be at least 0")
    if args.top_k < 0:
        mistakes.append(f"--top-k: {args.top_k} must be at least 0")
    if not 0 < args.top_p <= 1:
        mistakes.append(f"--top-p: {args.top_p} must be above 0 and at most 1")
    if "" in args.stop:
        mistakes.append("--stop: an empty text would end each sample before it begins")
    if mistakes:
        raise UserError(*mistakes)

    import torch

    from shardwise.checkpoint.folder import checkpoint_folder
    from shardwise.checkpoint.weights import load_model
    from shardwise.data.tokenizer import load_tokenizer
    from shardwise.model.generate import Sampling, generate
    from shardwise.train.step import choose_device

    folder = checkpoint_folder(args.checkpoint)
    model, run = load_model(folder, device=choose_device(args.device))
    model.dtype = getattr(torch, args.dtype or run.train.dtype)
    tokenizer = load_tokenizer(folder)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)

    def finished(tokens: list[int]) -> bool:
        if tokens[-1] == tokenizer.end:
            return True
        return bool(args.stop) and any(stop in tokenizer.decode(tokens) for stop in args.stop)

    start = time.perf_counter()
    prompts = [tokenizer.encode(prompt) for prompt in args.prompt]
    made = generate(model, prompts, args.max_tokens, sampling, finished, use_cache=not args.no_cache)
    seconds = time.perf_counter() - start
    samples = []
    for prompt, tokens in zip(args.prompt, made, strict=True):
        text, ended_by = tokenizer.decode([t for t in tokens if t != tokenizer.end]), "length"
        if tokens[-1] == tokenizer.end:
            ended_by = "end"
        cuts = [text.index(stop) for stop in args.stop if stop in text]
        if cuts:
            text, ended_by = text[: min(cuts)], "stop"
        samples.append(dict(prompt=prompt, text=text, tokens=tokens, ended_by=ended_by))
    if args.json:
        count = sum(map(len, made))
        print(json.dumps(dict(checkpoint=str(folder), samples=samples, seconds=seconds, tokens_per_s=count / seconds)))
    else:
        print("\n\n".join(s["prompt"] + s["text"] for s in samples))
    return 0
