"""Schedulers and sequences small enough to write down what they do."""

from __future__ import annotations

from typing import Any

from shardwise.schedules.serving import PagePool, Scheduler, Sequence, Settings, Step
from shardwise.schedules.serving.queues import WaitingQueue


def made(
    pages: int = 100, page_tokens: int = 4, host_pages: int = 0, cache: bool = False, **settings: Any
) -> Scheduler:
    """A scheduler with so many pages to hand out, and no watermark to speak of."""
    given = dict(max_sequences=8, max_step_tokens=16, longest=1000, watermark=0.0) | settings
    return Scheduler(Settings(**given), PagePool(1 + pages, page_tokens, host_pages, cache))


def added(scheduler: Scheduler, prompt: int, max_new: int = 100, **fields: Any) -> Sequence:
    sequence = Sequence(f"s{scheduler._arrivals}", list(range(prompt)), max_new, **fields)
    scheduler.add(sequence)
    return sequence


def chunks(step: Step) -> list[tuple[object, int, int, int]]:
    return [(chunk.sequence.key, chunk.start, chunk.count, chunk.samples) for chunk in step.chunks]


def service_of(queue: WaitingQueue, name: str) -> int:
    """What a user has been served, weighted."""
    user = queue._users.get(name)
    return queue._gone.get(name, 0) if user is None else user.service


def run(scheduler: Scheduler, steps: int = 1) -> Step:
    """Steps that sample sevens; the last of them."""
    for _ in range(steps):
        step = scheduler.schedule()
        scheduler.update(step, [[7]] * step.sampling)
    return step
