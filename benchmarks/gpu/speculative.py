"""What guesses cost and bring on one GPU, with made-up weights, whose models never agree. So it is in two parts, neither of which
says how often guesses are right:

1. Steps: the time of a step that verifies k guesses of each sequence against a plain one, and of k steps of the draft model; and
   the acceptance at which both ways break even, by (1 - a^(k+1)) / (1 - a) tokens a step.
2. Loads through the whole engine, lookup, draft model and verification at work, but guesses are TAKEN to be right with a
   probability that the benchmark says. Steps, pages and host are real; the text is not.

python benchmarks/gpu/speculative.py llama3-8b --draft llama3-1b [--tokens 2 4 6] [--acceptance 0 0.6 0.8 1] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LOADS = {1: ("128", "256"), 8: ("32", "128")}
KEYS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--draft", default="llama3-1b")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2, 4, 6])
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.0, 0.6, 0.8, 1.0])
    parser.add_argument("--skip-loads", action="store_true")
    parser.add_argument("--out", type=Path)
    args, overrides = parser.parse_known_args()
    words = [
        f"model.preset={args.preset}", "model.max_positions=8192", "train.dtype=bfloat16", "serve.prefix_cache=false",
        "serve.max_sequences=8", "serve.max_step_tokens=2048", *overrides,
    ]  # fmt: skip
    rows: dict[str, Any] = dict(preset=args.preset, draft=args.draft, overrides=overrides)
    rows["steps"] = steps(words, args.draft, args.tokens)
    if not args.skip_loads:
        rows["loads"] = loads(words, args.draft, args.tokens, args.acceptance)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


def engine_with(words: Sequence[str], draft: str, count: int, way: str) -> Any:
    """An engine of made-up weights that guesses so, its steps recorded."""
    from shardwise.measure.serve_load import ready_engine
    from shardwise.run import read_run

    more = [f"serve.speculate={way}", f"serve.draft_tokens={count}"] + (
        [f"serve.draft={draft}"] if way == "draft" else []
    )
    return ready_engine(read_run(None, [*words, *more]))


def steps(words: Sequence[str], draft: str, counts: Sequence[int]) -> list[dict[str, float]]:
    """Milliseconds from the host's first to its last word of a step, and of the device alone."""
    import torch

    from shardwise.measure.bench.serving import DeviceWatch
    from shardwise.serve.runner import Row, Runner

    most = max(counts)
    engine = engine_with(words, draft, most, "draft")
    large: Runner = engine.runner
    small: Runner = engine.drafter.runner
    watch = DeviceWatch(large.device)
    pages = -(-(KEYS + most + 1) // engine.pool.page_tokens)
    for runner in (large, small):
        for cache in runner.cache.tensors():
            cache.normal_()
        runner.set_pages([(s, n, 1 + (s - 1) * pages + n) for s in range(1, 9) for n in range(pages)])

    def whole(work: Callable[[], Any]) -> float:
        found = []
        for _ in range(40):
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
        return 1e3 * sorted(found)[len(found) // 2]

    def rows(sequences: int, tokens: int) -> list[Row]:
        made = None if tokens == 1 else [7] * tokens
        return [Row(slot, KEYS, made, tokens, tokens) for slot in range(1, sequences + 1)]

    def guess(sequences: int, count: int) -> None:
        launched = [small.launch(rows(sequences, 1)) for _ in range(count)]
        for each in launched:
            each.read()

    names = ("sequences", "guesses", "step ms", "device ms", "x plain", "drafting ms", "even ngram", "even draft")
    print("".join(f"{name:>12}" for name in names))
    found = []
    for sequences in LOADS:
        plain = 0.0
        for count in (0, *counts):
            asked = rows(sequences, 1 + count)
            step = whole(lambda asked=asked: large.launch(asked).read())  # type: ignore[misc]
            plain = plain or step
            device = 1e3 * watch.seconds(lambda asked=asked: large.launch(asked).tokens)  # type: ignore[misc]
            drafting = whole(lambda n=sequences, k=count: guess(n, k)) if count else 0.0  # type: ignore[misc]
            even = [break_even(took / plain, count) for took in (step, step + drafting)]
            found.append(
                dict(sequences=sequences, guesses=count, step_ms=step, device_ms=device, plain_ms=plain, drafting_ms=drafting,
                     even_ngram=even[0], even_draft=even[1])
            )  # fmt: skip
            shown = (f"{x:12.3f}" for x in (step, device, step / plain, drafting))
            ends = (f"{share:12.1%}" if share <= 1 else f"{'never':>12}" for share in even)
            print(f"{sequences:12}{count:12}" + "".join(shown) + "".join(ends), flush=True)
    return found


def break_even(tokens: float, count: int) -> float:
    """The acceptance at which a step gives as many more tokens as it takes longer; infinite where none does."""
    from shardwise.plan.serving.drafting import acceptance_of

    if tokens <= 1:
        return 0.0
    return acceptance_of(tokens, count) if tokens <= 1 + count else float("inf")


def loads(words: Sequence[str], draft: str, counts: Sequence[int], shares: Sequence[float]) -> list[dict[str, Any]]:
    """Tokens a second of one sequence and of eight, guesses taken to be right by chance."""
    import torch

    from shardwise.measure.serve_load import measure_load
    from shardwise.plan.serving.simulate import requests_of
    from shardwise.run import read_run

    found = []
    print(f"{'way':>6} {'guesses':>7} {'taken right':>11}" + "".join(f"{n:>6} x tokens/s" for n in LOADS))
    for way, count in [("none", 1), *((way, count) for way in ("ngram", "draft") for count in counts)]:
        engine = engine_with(words, draft, count, way)
        for share in shares if way != "none" else (0.0,):
            speeds = {}
            assume(engine, share, count)
            for clients, (inputs, outputs) in LOADS.items():
                load = [f"serve.concurrency={clients}", f"serve.requests={clients}", f"serve.input_tokens={inputs}"]
                run = read_run(None, [*words, *load, f"serve.output_tokens={outputs}"])
                measured = [measure_load(engine, run.serve, requests_of(run.serve)) for _ in range(2)]
                speeds[clients] = max(each.figures["output_tokens_per_s"] for each in measured)
            found.append(dict(way=way, guesses=count, taken_right=share, tokens_per_s=speeds))
            print(
                f"{way:>6} {count:7} {share:11.0%}" + "".join(f"{speed:17,.1f}" for speed in speeds.values()),
                flush=True,
            )
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return found


def assume(engine: Any, share: float, count: int) -> None:
    """Take guesses to be right with a probability; lookup looks, and guesses even where it finds nothing."""
    draw, drafter = random.Random(1), engine.drafter
    if drafter is None:
        return
    propose = type(drafter).propose

    def always(sequences: Any) -> None:
        propose(drafter, sequences)
        for sequence in sequences:
            if not sequence.pending:
                sequence.drafts = sequence.drafts or [7] * count

    def accepted(chunk: Any, picked: list[int]) -> list[int]:
        right = 0
        while right < chunk.samples - 1 and draw.random() < share:
            right += 1
        if chunk.samples > 1:
            engine.drafts.add(chunk.samples - 1, right)
        return picked[: right + 1]

    drafter.propose, engine._accepted = always, accepted


if __name__ == "__main__":
    main()
