"""GRPO on one GPU: how fast a run draws its answers beside the engine alone with the same load, and whether engine and trainer give
the same bits. Weights are made up, so answers run to their limit.

python benchmarks/gpu/grpo.py [--preset llama3-1b] [--answers 256] [--tokens 512] [--out FILE]

About a minute on an H200, most of it the kernels' compilation.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.cli.main import main as shardwise
from shardwise.measure.serve_load import random_model
from shardwise.run import Run, run_from_dict
from shardwise.serve.engine import engine_of
from shardwise.serve.request import Request, Sampling
from shardwise.train.step import TrainState
from shardwise.tune.grpo import GrpoSource

PROMPT, GROUP = 128, 8


def make_run(folder: Path, preset: str, answers: int, tokens: int, invariant: bool) -> Run:
    """A run whose batch is that many answers, one microbatch at a time so that a step fits."""
    return run_from_dict(
        dict(
            model=dict(preset=preset),
            data=dict(sets=[str(folder / "set")], holdout=0.1),
            train=dict(
                steps=4, global_batch=answers, microbatch=min(answers, 16), seq_len=PROMPT + tokens, dtype="bfloat16", lr=1e-6,
                device="cuda", eval_every=0, invariant=invariant, schedule="constant",
            ),
            objective=dict(kind="grpo", rewards=[f"{folder}/rewards.py:parity"], group=GROUP, completion_tokens=tokens),
            serve=dict(max_sequences=answers, invariant=invariant),
            cluster=dict(chip="h200"),
        )
    )  # fmt: skip


def write_task(folder: Path) -> None:
    """Prompts of random letters."""
    draw = random.Random(0)
    rows = [dict(prompt="".join(draw.choice("abcdefgh ") for _ in range(PROMPT))) for _ in range(600)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text("def parity(prompt, completion, row):\n    return len(completion) % 2\n")
    shardwise(["data", "build", "--chat", str(folder / "rows.jsonl"), "--out", str(folder / "set"), "--json"])


def free_memory() -> None:
    """Give back what is no longer used: the next engine takes all that is left."""
    gc.collect()
    torch.cuda.empty_cache()


def engine_alone(run: Run, source: GrpoSource, logprobs: int | None) -> float:
    """Tokens a second of an engine with a network of its own, the same prompts and as many answers."""
    model = random_model(run)
    engine = engine_of(model, run, longest=run.train.seq_len)
    engine.warm()
    prompts = source.prompts.take(np.arange(run.train.global_batch // GROUP))
    best = 0.0
    for attempt in range(3):
        torch.cuda.synchronize()
        began, made = time.perf_counter(), 0
        for n, prompt in enumerate(prompts):
            sampling = Sampling(1.0, seed=n, logprobs=logprobs)
            tokens = tuple(prompt.tokens.tolist())
            engine.add(
                Request(f"{attempt}-{n}", tokens, run.objective.completion_tokens, sampling, GROUP, ignore_end=True)
            )
        while not engine.idle:
            made += sum(len(output.tokens) for output in engine.step())
        best = max(best, made / (time.perf_counter() - began))
        engine.pool.clear()
    return best


def rollouts(run: Run, steps: int) -> dict[str, Any]:
    """Steps of the run: the fastest round, and the mismatch of each step."""
    source, state = GrpoSource(run), TrainState(run)
    source.attach(state, print, lambda _: None)
    source.rounds.rollouts.engine.warm()
    speeds, mismatch, seconds = [], [], []
    for batch in source.batches(steps):
        began = time.perf_counter()
        result = state.train_step(batch)
        measured = dict(zip(state.objective.metrics, result.read_measured(), strict=True))
        seconds.append(time.perf_counter() - began)
        speeds.append(source.figures()["rollout_tokens_per_s"])
        mismatch.append(measured["mismatch"])
    weights = source.rounds.rollouts.weights
    own = sum(t.numel() * t.element_size() for t in weights.copied.values())
    return dict(
        rollout_tokens_per_s=max(speeds), mismatch=mismatch, train_seconds=min(seconds), own_weights_gib=own / 2**30,
        pages=source.rounds.rollouts.engine.pool.pages, peak_gib=torch.cuda.max_memory_allocated() / 2**30,
    )  # fmt: skip


def main() -> None:
    """Print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-1b")
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_task(folder)
        run = make_run(folder, args.preset, args.answers, args.tokens, False)
        found: dict[str, Any] = {"engine_alone": engine_alone(run, GrpoSource(run), None)}
        free_memory()
        found["engine_alone_with_logprobs"] = engine_alone(run, GrpoSource(run), 0)
        free_memory()
        found |= rollouts(run, 3)
        found["share"] = found["rollout_tokens_per_s"] / found["engine_alone"]
        free_memory()
        exact = rollouts(make_run(folder, args.preset, min(args.answers, 32), min(args.tokens, 64), True), 2)
        found["invariant_mismatch"] = exact["mismatch"]
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
