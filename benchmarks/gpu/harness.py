"""This trainer beside its peers on one GPU: the same model, batch, data and precision, each in a process of its own, in one run.

A case is a trainer with its options: `shardwise`, `shardwise:fp8=tensorwise`, `shardwise:recompute=full`, `torchtitan`,
`torchtitan:checkpoint=full`, `torchtitan:start=own`, `liger`, `transformers:compile=1`. Each trains on random tokens in bfloat16
with float32 parameters, AdamW and clipping, from weights of one distribution and with one learning rate; every step has other
tokens. A chip at its limit of power grows slower as it grows warmer, so with `--in-turn` all cases are made ready first, stand in
the GPU's memory together, and train in turns, some steps each. The time is the median distance of CUDA events between steps,
without waiting in between, once a trainer has settled (this one tries out algorithms for 320 steps where none are known for its
shapes, unless `tune_products=false`); memory is the most that the allocator had given out after the first steps; TFLOP/s are model
FLOPs (see `shardwise/plan/cost/flops.py`): 6 for a parameter and token, attention causal, embedding not counted; joules the GPU's
own count. Seconds to the first step count from the start of the process.

    pip download --no-deps -d wheels torchtitan==0.2.2 liger-kernel tyro docstring_parser typeguard
    for wheel in wheels/*.whl; do unzip -q -o $wheel -d peers; done
    python benchmarks/gpu/harness.py torchtitan shardwise --in-turn [--peers peers] [--model 1.5B] [--batch 8] [--seq 4096]
    python benchmarks/gpu/harness.py --split          # one step of this trainer taken apart, each part against its floor
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import SHAPES, need_gpu, our_run

from shardwise.run import UserError

TRAINERS = ("shardwise", "torchtitan", "liger", "transformers")
HEADER = """\
| trainer | step | speed in tokens | model FLOPs | peak memory | energy of a step | beside the first | first step |
|---|---|---|---|---|---|---|---|"""


def main() -> int:
    """Measure the cases, and print a row of a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="trainers, with options")
    parser.add_argument(
        "--in-turn", action="store_true", help="all cases in memory at once, some steps of each in turn"
    )
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder with the unpacked peers")
    parser.add_argument("--model", choices=SHAPES, default="1.5B")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seq", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=3, help="turns that each case gets")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed in a turn")
    parser.add_argument("--warm", type=int, default=10, help="steps before those: all that compiles, looks and settles")
    parser.add_argument("--split", action="store_true", help="take a step of this trainer apart")
    parser.add_argument("--output", type=Path, help="also write the results here, as JSON")
    args = parser.parse_args()
    for case in args.cases:
        check(case, args, parser)
    need_gpu()
    cases = args.cases or ([] if args.split else ["shardwise"])
    results: list[dict[str, Any]] = []
    if cases:
        print(HEADER, flush=True)
    for group in [cases] if args.in_turn else [[case] for case in cases]:
        for result in measure(group, args):
            results.append(result)
            print(line(result, results[0]), flush=True)
            if args.output:
                args.output.write_text(json.dumps(results, indent=1) + "\n")
    if args.split:
        from floors import split

        results.append(split(SHAPES[args.model], args.batch, args.seq))
        print(parts(results[-1]))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any("error" in one for one in results) else 0


def check(case: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with a sentence where a case is none."""
    name, _, text = case.partition(":")
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if name not in TRAINERS:
        parser.error(f"{name}: no such trainer; there are {', '.join(TRAINERS)}")
    if any(not value for _, _, value in pairs):
        parser.error(f"{case}: an option has the form name=value")
    if name == "shardwise":
        try:
            our_run(SHAPES[args.model], args.batch, args.seq, {key: value for key, _, value in pairs})
        except UserError as error:
            parser.error(f"{case}: {error}")


def tell(text: str) -> None:
    """Progress, for who waits; not for who reads the table."""
    print(text, file=sys.stderr, flush=True)


class Case:
    """A case in a process of its own, so that no one's compiled code is another's."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.error = name, ""
        settings = dict(
            case=name,
            model=args.model,
            batch=args.batch,
            seq=args.seq,
            warm=args.warm,
            peers=str(args.peers.resolve()),
            began=time.time(),
        )
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("case.py")), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
        )
        self.result: dict[str, Any] = dict(case=name, model=args.model, batch=args.batch, seq=args.seq) | self.answer()
        self.turns: list[dict[str, Any]] = []

    def answer(self) -> dict[str, Any]:
        """The next thing it says, unless it has failed."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                return dict(json.loads(text))
        if not self.error:
            self.said.seek(0)
            said = self.said.read().strip().splitlines()
            self.error = said[-1] if said else f"exit code {self.process.wait()}"
        return {}

    def turn(self, steps: int) -> None:
        """Let it train so many steps."""
        if not self.error:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # then its answer says why
                self.process.stdin.write(f"{steps}\n")
                self.process.stdin.flush()
            answer = self.answer()
            self.turns += [answer] if answer else []

    def end(self) -> dict[str, Any]:
        """Let it go; what it measured."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.result |= self.answer()
        self.process.wait()
        if self.error:
            return dict(case=self.name, error=self.error)
        every = [one for turn in self.turns for one in turn["milliseconds"]]
        milliseconds = statistics.median(every)
        rate = self.result["batch"] * self.result["seq"] / milliseconds * 1e3
        return self.result | dict(
            milliseconds=milliseconds,
            turns=[statistics.median(turn["milliseconds"]) for turn in self.turns],
            fastest=min(every),
            slowest=max(every),
            joules=statistics.median(turn["joules"] for turn in self.turns),
            tokens_per_second=rate,
            tflops=rate * flops_per_token(SHAPES[self.result["model"]], self.result["seq"]) / 1e12,
        )


def measure(names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """These cases, in turns."""
    cases = []
    for name in names:
        tell(f"{name}: compiles and settles")
        cases.append(Case(name, args))
    for number in range(args.rounds):
        tell(f"turn {number + 1} of {args.rounds}")
        for case in cases:
            case.turn(args.steps)
    return [case.end() for case in cases]


def line(one: dict[str, Any], first: dict[str, Any]) -> str:
    """A result for people, as a row of a table."""
    if "error" in one:
        return f"| {one['case']} | failed: {one['error']} |"
    # In turns, each turn beside the first's turn before it.
    ratio = (
        statistics.median(a / b for a, b in zip(first["turns"], one["turns"], strict=False))
        if "turns" in first
        else 1.0
    )
    return (
        f"| {one['case']} | {one['milliseconds']:.1f} ms | {one['tokens_per_second']:,.0f} tokens/s | {one['tflops']:.0f} TFLOP/s "
        f"| {one['memory_gib']:.1f} GiB | {one['joules']:.0f} J | {ratio:.3f} | {one['first_step_seconds']:.0f} s |"
    )


def parts(one: dict[str, Any]) -> str:
    """The parts of a step for people, as a table."""
    names = {
        "matmul": "matrix products",
        "attention": "attention",
        "memory": "everything else",
        "idle": "no kernel runs",
    }
    rows = ["| part | in the step | floor | |", "|---|---|---|---|"]
    for key, name in names.items():
        mine, floor = one["measured"][key], one["floor"][key]
        rows.append(
            f"| {name} | {mine:.1f} ms | {floor:.1f} ms | {mine / floor - 1:+.0%} |"
            if floor
            else f"| {name} | {mine:.1f} ms | | |"
        )
    backends = ", ".join(f"{name} {took:.1f} ms" for name, took in one["attention_by_backend"].items())
    return "\n".join(
        [*rows, "", f"Attention alone: {backends}. A large copy moves {one['bandwidth_gbs'] / 1e3:.2f} TB/s."]
    )


def flops_per_token(shape: dict[str, int], seq: int) -> float:
    """Model FLOPs, by this project's convention."""
    from shardwise.plan.cost.flops import training_flops
    from shardwise.run import run_from_dict

    return training_flops(run_from_dict(dict(model=shape, train=dict(seq_len=seq))).model, seq)


if __name__ == "__main__":
    sys.exit(main())
