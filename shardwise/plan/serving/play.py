"""Plays a load: requests come as the run says, the engine's own scheduler makes its steps, and each takes the time that the cost
model gives it. What comes out is what a load generator would have seen.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from shardwise.plan.serving.step_time import StepTime
from shardwise.run.lengths import parse_lengths
from shardwise.run.serve_config import ServeConfig
from shardwise.schedules.serving import PagePool, Scheduler, Sequence, Settings
from shardwise.schedules.serving.figures import Limits, LoadFigures, Made
from shardwise.schedules.serving.sequence import Step

STEADY = 4
"""Where a run does not say how many requests: so many times those that run at once, and 200 at least."""


@dataclass
class Asked:
    """A request on its way."""

    due: float
    sequence: Sequence
    first: float = 0.0


class Stages:
    """The stages of a pipeline, which hold as much of each step, and when each is free."""

    def __init__(self, count: int) -> None:
        self.count, self._free = count, [0.0] * count

    def run(self, now: float, seconds: float) -> float:
        """When a step is done that may begin now, and takes so long on all stages together."""
        for stage, free in enumerate(self._free):
            now = self._free[stage] = max(now, free) + seconds / self.count
        return now


@dataclass(frozen=True)
class Played:
    """What became of a load on one engine."""

    figures: LoadFigures
    steps: int
    preemptions: int
    most_running: int
    most_pages: int


def requests_of(serve: ServeConfig, seed: int = 0) -> list[tuple[float, int, int]]:
    """When each request is due, and its lengths; all are due at once where clients wait for their answers."""
    usual = max(200, STEADY * min(serve.concurrency or serve.max_sequences, serve.max_sequences))
    count = serve.requests or usual
    inputs = parse_lengths(serve.input_tokens, "serve.input_tokens").draw(count, seed)
    outputs = parse_lengths(serve.output_tokens, "serve.output_tokens").draw(count, seed + 1)
    draw, due, now = random.Random(seed), [], 0.0
    for _ in range(count):
        due.append(now)
        now += draw.expovariate(serve.rate) if serve.rate else 0.0
    return list(zip(due, inputs, outputs, strict=True))


def play(
    serve: ServeConfig, asked: list[tuple[float, int, int]], times: StepTime, pages: int, longest: int, window: int = 0,
    concurrency: int = 0,
) -> Played:  # fmt: skip
    """One engine with so many pages. With a `concurrency`, so many requests are under way at a time."""
    pool = PagePool(pages, serve.page_tokens, prefix_cache=False)
    sequences = min(serve.max_sequences, serve.max_step_tokens)
    stages = Stages(times.serving.pipeline)
    settings = Settings(sequences, serve.max_step_tokens, longest, serve.preemption, window, stages=stages.count)
    scheduler = Scheduler(settings, pool)
    under_way: deque[tuple[Step, float]] = deque()
    coming = deque(asked)
    running: dict[Sequence, Asked] = {}
    made: list[Made] = []
    arrive = times.constants["arrive"] * times.serving.engine.arrive
    now, steps, most_running, most_pages, failed = 0.0, 0, 0, 0, 0

    def admit() -> None:
        nonlocal failed
        while coming and (coming[0][0] + arrive <= now if not concurrency else len(running) < concurrency):
            due, prompt, answer = coming.popleft()
            if scheduler.reasons(prompt, answer):
                failed += 1
                continue
            sequence = Sequence(len(running), [0] * prompt, answer, lookahead=stages.count == 1)
            running[sequence] = Asked(due if not concurrency else now, sequence)
            scheduler.add(sequence)

    while coming or running:
        admit()
        if not running:
            if not coming:
                break
            now = max(now, coming[0][0] + arrive)
            continue
        step = scheduler.schedule()
        chunks = step.chunks
        keys = sum(chunk.start + 1 for chunk in chunks[: step.decoding])
        prompts = [(chunk.start, chunk.count) for chunk in chunks[step.decoding :]]
        if chunks:
            under_way.append((step, stages.run(now, times.seconds(step.decoding, keys, prompts, step.sampling))))
            steps += 1
            if len(under_way) < stages.count:
                continue
        if not under_way:
            continue
        step, now = under_way.popleft()
        chunks = step.chunks
        most_running, most_pages = max(most_running, scheduler.running), max(most_pages, pool.used)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        scheduler.update(step, [[0]] * len(sampling))
        for sequence in sampling:
            one = running[sequence]
            one.first = one.first or now
            if sequence.generated == sequence.max_new:
                scheduler.finish(sequence)
                del running[sequence]
                count = sequence.max_new
                tpot = (now - one.first) / (count - 1) * 1e3 if count > 1 else None
                made.append(
                    Made(one.due, 0.0, (one.first - one.due) * 1e3, tpot, (now - one.due) * 1e3, sequence.prompt, count)
                )
    limits = Limits(*(limit or float("inf") for limit in (serve.ttft_ms, serve.tpot_ms)))
    errors = {"longer than the engine can hold": failed} if failed else {}
    figures = LoadFigures(tuple(made), len(made) + failed, now, limits, errors)
    return Played(figures, steps, scheduler.preemptions, most_running, most_pages)
