"""Simulates a load: requests arrive as the run says, the engine's own scheduler makes its steps, and each step takes the time that
the cost model predicts. The result is what a load generator would have measured.

On a GPU the engine launches a step before it reads the results of the previous one, and so does the simulation: a step begins when
the device has finished the last one and the host has prepared it, and the host reads its results after launching the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf

from shardwise.hardware.power import Boost, Power, power_of
from shardwise.plan.serving.drafting import Speculation
from shardwise.plan.serving.step_time import Spent, StepTime
from shardwise.run.lengths import parse_lengths
from shardwise.run.load import LoadRequest, draw_load
from shardwise.run.problems import Problem, UserError, counted
from shardwise.run.sections.serve import MOST_REQUESTS, ServeConfig
from shardwise.schedules.serving import PagePool, Scheduler, Sequence, Settings
from shardwise.schedules.serving.figures import TOO_LONG, Limits, LoadFigures, RequestTimes
from shardwise.schedules.serving.sequence import Step

STEADY, FEWEST = 4, 200
"""Where a run gives no number of requests: this many times those that run at once, and at least so many on each engine."""


@dataclass(frozen=True)
class EngineSize:
    """Where a load is simulated: the pages of a device and of its host, and the longest sequence and window of the model."""

    pages: int
    host_pages: int
    longest: int
    window: int = 0


class Stages:
    """Pipeline stages, each with an equal share of every step, and the time when each is free. Behind rests, and behind steps that
    mostly read, a chip computes at a higher clock for a while than where its steps were measured."""

    def __init__(self, count: int, power: Power | None = None) -> None:
        self.count, self._free = count, [0.0] * count
        self._boosts = [Boost(power) for _ in range(count)] if power is not None else [None] * count
        self._reading = power.watts["memory"] if power is not None else 0.0

    def run(self, now: float, spent: Spent) -> float:
        """The end of a step that may begin at `now`."""
        for stage, (free, boost) in enumerate(zip(self._free, self._boosts, strict=True)):
            begin, seconds = max(now, free), spent.device / self.count
            if boost is not None:
                computing = spent.computing / self.count
                boost.rest(begin - free)
                boost.rest(seconds - computing, self._reading)
                seconds += boost.compute(computing) - computing
            now = self._free[stage] = begin + seconds
        return now


@dataclass(frozen=True)
class Simulated:
    """The result of a load on one engine."""

    figures: LoadFigures
    steps: int
    preemptions: int
    most_running: int
    most_pages: int
    drafted: int = 0
    accepted: int = 0


@dataclass
class RunningRequest:
    """A request that is being served."""

    due: float
    asked: LoadRequest
    first: float = 0.0


def requests_of(serve: ServeConfig, seed: int = 0, engines: int = 1) -> list[LoadRequest]:
    """The requests of a run's load on so many engines."""
    if problem := too_many_requests(serve, engines):
        raise UserError(problem)
    inputs = parse_lengths(serve.input_tokens, "serve.input_tokens")
    outputs = parse_lengths(serve.output_tokens, "serve.output_tokens")
    return draw_load(_number_of_requests(serve, engines), serve.rate, inputs, outputs, seed)


def too_many_requests(serve: ServeConfig, engines: int) -> Problem | None:
    """What is wrong with a load that has more requests than can be simulated."""
    count = _number_of_requests(serve, engines)
    if count <= MOST_REQUESTS:
        return None
    fewer = [
        "serve.max_sequences",
        *["serve.concurrency"] * (serve.concurrency > 0),
        *["layout.replicate"] * (engines > 1),
    ]
    return Problem(
        f"0 means {count:,} requests for {counted(engines, 'replica')} that run up to {serve.max_sequences:,} at once each, and a "
        f"plan simulates {MOST_REQUESTS:,} at most; set serve.requests, or fewer {' or '.join(fewer)}",
        "serve.requests",
    )


def _number_of_requests(serve: ServeConfig, engines: int) -> int:
    """Clients run at once as far as the engines let them, and use no more engines than they are; of a rate nobody knows before how
    many do, and what one engine lets run is enough."""
    closed = serve.concurrency > 0 and not serve.rate
    at_once = min(serve.concurrency, serve.max_sequences * engines) or serve.max_sequences
    return serve.requests or max(FEWEST * min(engines, serve.concurrency if closed else engines), STEADY * at_once)


def simulate(
    serve: ServeConfig, asked: Items[LoadRequest], times: StepTime, size: EngineSize, concurrency: int = 0, arrive: float = 0.0,
    guesses: Speculation | None = None,
    group: int = 1,
) -> Simulated:  # fmt: skip
    """Simulates one engine. With `concurrency`, that many requests are in flight at a time. A request takes `arrive` seconds to the
    engine and back. Each `group` consecutive requests are completions of one prompt: all but the first are forked once the prompt
    is computed."""
    pool = PagePool(size.pages, serve.page_tokens, size.host_pages, serve.prefix_cache)
    sequences = min(serve.max_sequences, serve.max_step_tokens)
    stages = Stages(times.serving.pipeline, power_of(times.serving.chip))
    ahead = times.gpu and stages.count == 1 and guesses is None
    kept = stages.count - 1 or int(ahead)
    settings = Settings(
        sequences, serve.max_step_tokens, size.longest, serve.preemption, size.window, stages=stages.count
    )
    scheduler = Scheduler(settings, pool)
    coming = deque(enumerate(asked))
    clients = deque([arrive] * min(concurrency, len(asked)))
    """When the next request of each idle client reaches the engine."""
    running: dict[Sequence, RunningRequest] = {}
    leaders: dict[int, Sequence] = {}
    unforked: dict[Sequence, list[tuple[int, RunningRequest]]] = {}
    """Requests that wait for the prompt of the first of their group."""
    made: list[RequestTimes] = []
    launched: deque[tuple[Step, float]] = deque()
    host, failed = 0.0, 0

    def next_arrival() -> float:
        if not coming or (concurrency and not clients):
            return inf
        return clients[0] if concurrency else coming[0][1].due + arrive

    def admit() -> None:
        nonlocal failed
        while next_arrival() <= host:
            number, one = coming.popleft()
            if scheduler.reasons(one.input, one.output):
                failed += 1
                continue
            begun = RunningRequest(clients.popleft() - arrive if concurrency else one.due, one)
            if number % group:
                unforked[leaders[number // group]].append((number, begun))
                continue
            # Prompts are random, so no two share a page: a salt has the same effect.
            sequence = Sequence(number, [0] * one.input, one.output, salt=str(number).encode(), lookahead=ahead)
            running[sequence] = begun
            if group > 1:
                leaders[number // group], unforked[sequence] = sequence, []
            scheduler.add(sequence)

    def fork() -> None:
        for sequence in [each for each in unforked if each.state == "decode"]:
            for number, begun in unforked.pop(sequence):
                running[scheduler.fork(sequence, number, lookahead=ahead)] = begun

    def read(step: Step) -> None:
        sampling = [chunk.sequence for chunk in step.chunks if chunk.samples]
        scheduler.update(step, [[0]] * len(sampling) if guesses is None else guesses.sampled(step))
        for sequence in sampling:
            one = running.get(sequence)
            if one is None:
                continue
            one.first = one.first or host
            if sequence.generated == sequence.max_new:
                scheduler.finish(sequence)
                del running[sequence]
                made.append(_made(one, host))
                clients.append(host + arrive)

    while coming or running:
        admit()
        if not running:
            if not coming:
                break
            host = max(host, next_arrival())
            continue
        if guesses is not None:
            guesses.propose(scheduler.decoding)
        step = scheduler.schedule()
        if step.chunks:
            host += guesses.seconds(step) if guesses is not None else 0.0
            spent = times.of(*step_sizes(step))
            end = stages.run(host + spent.before, spent)
            host += spent.before + spent.launch
            launched.append((step, max(end, host)))
            fork()
        if launched and (len(launched) > kept or not step.chunks):
            done, end = launched.popleft()
            host = max(host, end)
            read(done)
    limits = Limits(*(limit or float("inf") for limit in (serve.ttft_ms, serve.tpot_ms)))
    figures = LoadFigures(tuple(made), len(made) + failed, host, limits, {TOO_LONG: failed} if failed else {})
    did, told = scheduler.did, (guesses.drafted, guesses.accepted) if guesses is not None else (0, 0)
    return Simulated(figures, did.steps, scheduler.preemptions, did.most_running, did.most_pages, *told)


def step_sizes(step: Step) -> tuple[int, int, list[tuple[int, int]], int]:
    """The sizes that the time of a step depends on: decoding rows, their keys, prompt chunks as (tokens before, new tokens), and
    the number of sampled tokens. A draft token is computed like one more sequence."""
    decoding, prompts = step.chunks[: step.decoding], step.chunks[step.decoding :]
    rows = sum(chunk.count for chunk in decoding)
    keys = sum(chunk.count * (2 * chunk.start + chunk.count + 1) // 2 for chunk in decoding)
    return rows, keys, [(chunk.start, chunk.count) for chunk in prompts], step.sampling + rows - step.decoding


def _made(one: RunningRequest, now: float) -> RequestTimes:
    count = one.asked.output
    tpot = (now - one.first) / (count - 1) * 1e3 if count > 1 else None
    return RequestTimes(one.due, 0.0, (one.first - one.due) * 1e3, tpot, (now - one.due) * 1e3, one.asked.input, count)
