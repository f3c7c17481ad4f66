"""This trainer beside its peers on one GPU: the same model, batch, data and precision, each in a process of its own, in one run.

A case is a trainer with its options: `shardwise`, `shardwise:fp8=tensorwise`, `shardwise:recompute=full`, `torchtitan`,
`torchtitan:checkpoint=full`, `liger`, `transformers:compile=1`. Each trains on random tokens in bfloat16 with float32 parameters,
AdamW and clipping; every step has other tokens. The time is the median distance of CUDA events between steps, without waiting
in between; memory is the most that the allocator had given out after the first steps; TFLOP/s are model FLOPs (see
`shardwise/plan/work.py`): 6 for a parameter and token, attention causal, embedding not counted. Seconds to
the first step count from the start of the process.

    pip download --no-deps -d wheels torchtitan==0.2.2 liger-kernel tyro docstring_parser typeguard
    for wheel in wheels/*.whl; do unzip -q -o $wheel -d peers; done
    python benchmarks/gpu/harness.py shardwise torchtitan liger --peers peers [--model 1.5B] [--batch 8] [--seq 4096] [--output F]
    python benchmarks/gpu/harness.py --split          # one step of this trainer taken apart, each part against its floor
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from shapes import SHAPES, our_run

BEGAN = time.time()
Step = Callable[[int], Any]
"""Trains a step on the tokens of its number; what it gives back is not looked at."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="trainers, with options")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder with the unpacked peers")
    parser.add_argument("--model", choices=SHAPES, default="1.5B")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seq", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--warm", type=int, default=10, help="steps before those: all that compiles, looks and settles")
    parser.add_argument("--split", action="store_true", help="take a step of this trainer apart")
    parser.add_argument("--output", type=Path, help="also write the results here, as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)), flush=True)
        return 0
    results = []
    for case in args.cases or ([] if args.split else ["shardwise"]):
        results.append(in_child(case, args))
        print(line(results[-1], results[0]), flush=True)
    if args.split:
        from floors import split

        results.append(split(SHAPES[args.model], args.batch, args.seq))
        print(json.dumps(results[-1], indent=1))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any("error" in one for one in results) else 0


def in_child(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """A case in a process of its own, so that no one's memory or compiled code is another's."""
    command = [sys.executable, __file__, case, "--child"]
    for key in ("peers", "model", "batch", "seq", "steps", "warm"):
        command += [f"--{key}", str(getattr(args, key))]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"case": case, "error": done.stderr.strip().splitlines()[-12:] or f"exit code {done.returncode}"}


def line(one: dict[str, Any], first: dict[str, Any]) -> str:
    """A result for people, as a row of a table."""
    if "error" in one:
        return f"| {one['case']} | failed: {str(one['error'])[-400:]} |"
    ratio = first["milliseconds"] / one["milliseconds"] if "milliseconds" in first else float("nan")
    return (
        f"| {one['case']} | {one['milliseconds']:.1f} ms | {one['tokens_per_second']:,.0f} tokens/s | {one['tflops']:.0f} TFLOP/s "
        f"| {one['memory_gib']:.1f} GiB | {ratio:.3f} of the first's speed | first step after {one['first_step_seconds']:.0f} s |"
    )


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one case here."""
    import torch

    name, _, text = args.cases[0].partition(":")
    options = dict(pair.split("=", 1) for pair in text.split(",") if pair)
    shape = SHAPES[args.model]
    if name == "shardwise":
        step = ours(shape, args.batch, args.seq, options)
    else:
        sys.path.insert(0, str(args.peers.resolve()))
        import peers

        make = {"torchtitan": peers.torchtitan, "liger": peers.liger, "transformers": peers.transformers}[name]
        step = with_tokens(make(shape, args.seq, options), shape["vocab"], args.batch, args.seq)
    step(0)
    torch.cuda.synchronize()
    first = time.time() - BEGAN
    for number in range(1, args.warm):
        step(number)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
    events[0].record()
    for number, event in enumerate(events[1:], args.warm):
        step(number)
        event.record()
    torch.cuda.synchronize()
    taken = [a.elapsed_time(b) for a, b in pairwise(events)]
    milliseconds = statistics.median(taken)
    rate = args.batch * args.seq / milliseconds * 1e3
    return {
        "case": args.cases[0],
        "model": args.model,
        "batch": args.batch,
        "seq": args.seq,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "milliseconds": milliseconds,
        "fastest": min(taken),
        "slowest": max(taken),
        "tokens_per_second": rate,
        "tflops": rate * flops_per_token(shape, args.seq) / 1e12,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "first_step_seconds": first,
    }


def flops_per_token(shape: dict[str, int], seq: int) -> float:
    """Model FLOPs, by this project's convention."""
    from shardwise.plan.work import training_flops
    from shardwise.run import run_from_dict

    return training_flops(run_from_dict(dict(model=shape, train=dict(seq_len=seq))).model, seq)


def ours(shape: dict[str, int], batch: int, seq: int, options: dict[str, str]) -> Step:
    """The step of `shardwise train`, read a step later and replayed where its loop does so."""
    from shardwise.measure.verify import random_batch
    from shardwise.train.replay import attach
    from shardwise.train.step import Trainee

    run = our_run(shape, batch, seq, options)
    trainee = Trainee(run)
    attach(trainee)
    unread = []

    def step(number: int) -> None:
        unread.append(trainee.train_step(random_batch(run, number)))
        if len(unread) > 1:
            unread.pop(0).read()

    return step


def with_tokens(train: Callable[[Any, Any], Any], vocab: int, batch: int, seq: int) -> Step:
    """A peer's step on random tokens of the device."""
    import torch

    def step(number: int) -> None:
        tokens = torch.randint(0, vocab, (batch, seq + 1), device="cuda")
        train(tokens[:, :-1], tokens[:, 1:])

    return step


if __name__ == "__main__":
    sys.exit(main())
