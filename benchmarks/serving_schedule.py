"""What serving costs the host: a step of decoding sequences and whole loads in the scheduler alone, and a step of the engine around
a device that takes no time; all in CPU time.

    python benchmarks/serving_schedule.py

The device must not wait for the host: a step of 256 decoding sequences has to be scheduled and updated in half a millisecond.
"""

from __future__ import annotations

import sys
from random import Random
from statistics import median
from time import process_time_ns

from rich.console import Console
from rich.table import Table

from shardwise.schedules.serving import PagePool, Scheduler, Sequence, Settings, Step

ALLOWED = 500
"""Microseconds for 256 sequences."""
PAGE = 16
VOCAB = 50_000


def filled(sequences: int, cache: bool) -> Scheduler:
    """So many sequences that decode, at different places of their pages, with a thousand tokens to go."""
    draw, pool = Random(0), PagePool(sequences * 80, PAGE, prefix_cache=cache)
    scheduler = Scheduler(Settings(sequences, 8192, 4096), pool)
    for key in range(sequences):
        scheduler.add(Sequence(key, draw.choices(range(VOCAB), k=draw.randint(100, 164)), 1000))
    decoding = 0
    while decoding < sequences:
        step = scheduler.schedule()
        scheduler.update(step, [[1]] * step.sampling)
        decoding = step.decoding
    return scheduler


def decoding(sequences: int, cache: bool, ahead: bool, steps: int = 500) -> tuple[float, float]:
    """Microseconds of a step, schedule and update together: the median, and the mean, which has the edges of pages in it."""
    scheduler = filled(sequences, cache)
    sampled = [[1]] * sequences
    before: Step | None = scheduler.schedule() if ahead else None
    taken = []
    for _ in range(steps):
        start = process_time_ns()
        step = scheduler.schedule()
        scheduler.update(before or step, sampled)
        taken.append((process_time_ns() - start) / 1e3)
        before = step if ahead else None
    return median(taken), sum(taken) / steps


def load(requests: int, prompt: tuple[int, int], new: tuple[int, int], cache: bool) -> tuple[int, float, float]:
    """Requests that all come at once, played to the end: steps, microseconds a step, and microseconds a generated token."""
    draw, pool = Random(0), PagePool(40_000, PAGE, prefix_cache=cache)
    scheduler = Scheduler(Settings(512, 8192, 4096), pool)
    for key in range(requests):
        scheduler.add(Sequence(key, draw.choices(range(VOCAB), k=draw.randint(*prompt)), draw.randint(*new)))
    steps = generated = 0
    start = process_time_ns()
    while not scheduler.idle:
        step = scheduler.schedule()
        scheduler.update(step, [[1]] * step.sampling)
        for chunk in step.chunks:
            if len(chunk.sequence.tokens) == chunk.sequence.end:
                scheduler.finish(chunk.sequence)
        steps, generated = steps + 1, generated + step.sampling
    taken = (process_time_ns() - start) / 1e3
    return steps, taken / steps, taken / generated


def engine_step(sequences: int, logprobs: int | None, steps: int = 40) -> float:
    """Microseconds of the engine's step, from scheduling to outputs; recorded steps do nothing when they are replayed."""
    import torch

    from shardwise.model import Transformer
    from shardwise.run import ModelConfig
    from shardwise.run.derive import derive_model
    from shardwise.run.sections.serve import ServeConfig
    from shardwise.serve.engine import Engine
    from shardwise.serve.request import Request, Sampling
    from shardwise.serve.runner import Recorded, Runner

    class IdleRunner(Runner):
        def __init__(self) -> None:
            config = derive_model(ModelConfig(layers=1, hidden=32, heads=4, vocab=64), 4 * steps)
            pages = sequences * (4 * steps // PAGE + 1)
            model = Transformer(config).eval().requires_grad_(False)
            for parameter in model.parameters():
                parameter.zero_()  # what memory held may give logits that are not finite, which end a sequence
            super().__init__(model, pages, PAGE, sequences, 4 * steps, torch.float32)
            self.records = True

        def capture(self, compute: object, inputs: torch.Tensor, hidden: torch.Tensor) -> Recorded:
            rows = inputs.shape[1]
            return (lambda: None), inputs, hidden, torch.zeros(rows, 64), torch.ones(rows, dtype=torch.int64)

    torch.set_num_threads(1)
    runner = IdleRunner()
    pages = sequences * (4 * steps // PAGE + 1)
    engine = Engine(runner, ServeConfig(max_sequences=sequences, max_step_tokens=8192, page_tokens=PAGE), pages, True)
    for number in range(sequences):
        sampling = Sampling(1.0, seed=number, logprobs=logprobs)
        engine.add(Request(str(number), (1, 2, 3), 2 * steps, sampling, ignore_end=True))
    taken = []
    for _ in range(steps):
        start = process_time_ns()
        engine.step()
        taken.append((process_time_ns() - start) / 1e3)
    return median(taken)


def main() -> int:
    console, holds = Console(), True
    table = Table("decoding", "prefix cache", "ahead", "median µs a step", "mean µs a step", "µs a sequence")
    for sequences in (256, 1024):
        for cache in (False, True):
            for ahead in (False, True):
                middle, mean = decoding(sequences, cache, ahead)
                holds = holds and (sequences > 256 or mean <= ALLOWED)
                table.add_row(
                    f"{sequences}", f"{cache}", f"{ahead}", f"{middle:.0f}", f"{mean:.0f}", f"{mean / sequences:.2f}"
                )
    console.print(table)
    table = Table("load", "prefix cache", "steps", "µs a step", "µs a generated token")
    for name, requests, prompt, new in (
        ("256 of U(100,1024)/U(100,1024)", 256, (100, 1024), (100, 1024)),
        ("512 of 1000/1000", 512, (1000, 1000), (1000, 1000)),
    ):
        for cache in (False, True):
            steps, each, token = load(requests, prompt, new, cache)
            table.add_row(name, f"{cache}", f"{steps}", f"{each:.0f}", f"{token:.2f}")
    console.print(table)
    table = Table("engine, decoding", "logprobs", "median µs a step", "µs a sequence")
    for sequences in (64, 256):
        for logprobs in (None, 0):
            each = engine_step(sequences, logprobs)
            table.add_row(f"{sequences}", f"{logprobs is not None}", f"{each:.0f}", f"{each / sequences:.2f}")
    console.print(table)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
