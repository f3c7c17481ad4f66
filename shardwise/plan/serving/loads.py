"""How requests arrive, and how long they wait.

A *static* batch starts and ends together. In a *closed loop* each client sends its next request when the last response is complete,
so that each response waits for the others' prompts. Under *full load* all requests queue from the start, and memory decides how
many run at a time.

These closed forms are only for published rows of other engines (`shardwise validate`). Our own runs are simulated step by step
(`simulate.py`), and none of their numbers comes from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.plan.serving.cost import Cost, Serving, Shape, capacity, pass_cost, seconds


@dataclass(frozen=True)
class Load:
    """How requests arrive. `batch` is over all replicas; 0: as many as memory holds."""

    kind: Literal["static", "closed", "full"]
    batch: int
    input_len: int
    output_len: int
    requests: int = 0


@dataclass(frozen=True)
class Prepared:
    """The part of a prediction that does not depend on the fitted constants. Batches are those of one replica."""

    serving: Serving
    load: Load
    running: float
    waiting: float
    prompt: Cost
    """A prefill pass over the prompts of `together` sequences."""
    together: float
    steps: tuple[Cost, ...]
    """A decode step at the mean length of the responses; under full load also one of the last, smaller wave."""
    rest: float = 0.0


def prepare(s: Serving, load: Load) -> Prepared:
    """Counts the passes that a load needs."""
    mean = load.input_len + load.output_len / 2
    asked = max(1.0, load.batch / s.replicas)
    if load.kind == "static":
        together = asked / min(s.pipeline, asked)
        prompt = pass_cost(s, _prompt(load, together))
        return Prepared(s, load, asked, 0.0, prompt, together, (_step(s, asked, mean),))
    most = capacity(s, load.input_len, load.output_len)
    rest = 0.0
    if load.kind == "full":
        asked = max(1.0, (load.requests or 100 * most) / s.replicas)
    running = min(asked, most)
    together = max(1.0, min(running, s.engine.max_tokens // load.input_len)) if load.kind == "full" else 1.0
    sizes = [running]
    if load.kind == "full" and asked > running:
        rest = asked - running * math.floor(asked / running)
        sizes += [rest] if rest else []
    steps = tuple(_step(s, size, mean) for size in sizes)
    return Prepared(s, load, running, asked - running, pass_cost(s, _prompt(load, together)), together, steps, rest)


def _step(s: Serving, sequences: float, keys: float) -> Cost:
    """One token for each sequence. Stages work on different parts of the batch; a part passes all stages before its next step."""
    return pass_cost(s, Shape(sequences / min(s.pipeline, sequences), 1, keys, True))


def _prompt(load: Load, sequences: float) -> Shape:
    return Shape(sequences, load.input_len, load.input_len, False)


def quantities(p: Prepared, constants: Mapping[str, float]) -> dict[str, float]:
    """The measurable quantities: seconds, and tokens per second over all replicas."""
    s, load = p.serving, p.load
    outside = constants["step"] * s.engine.step
    step = seconds(s, p.steps[0], constants, decode=True) + outside
    prompt = seconds(s, p.prompt, constants, decode=False) + outside
    if load.kind == "static":
        return _static(p, prompt, step)
    # Prefill and decode in the same step read the weights only once.
    shared = constants["read"] * p.steps[0].seconds.get("read", 0.0) + outside if s.engine.shares_steps else 0.0
    added = max(prompt - shared, 0.5 * prompt) / s.pipeline
    if load.kind == "closed":
        return _closed(p, constants, added, step, prompt)
    return _full(p, constants, added, step, outside)


def _prompts_between(p: Prepared, constants: Mapping[str, float], added: float, sequences: float) -> float:
    """Seconds that the prefill of `sequences` sequences adds to the steps of one response. Attention replicas meet at the experts
    in every step, so the prompts of other replicas add time too, unless they fall into the same step."""
    steps = p.load.output_len
    passes = sequences / p.together
    others = steps * (1 - math.exp(-(p.serving.replicas - 1) * passes / steps))
    return added * (passes + constants["stall"] * others)


def _static(p: Prepared, prompt: float, step: float) -> dict[str, float]:
    load, stages = p.load, p.serving.pipeline
    parts = p.running / p.together
    # The parts of the prompt batch follow each other through the stages.
    first = prompt * (parts + stages - 1) / stages
    latency = first + (load.output_len - 1) * step
    tokens = load.batch * load.output_len / latency
    return {"ttft": first, "tpot": step, "decode": step, "latency": latency, "output_tokens_per_s": tokens}


def _closed(p: Prepared, constants: Mapping[str, float], added: float, step: float, prompt: float) -> dict[str, float]:
    """While a request decodes, each of the others begins once, and its prompt delays the request."""
    load = p.load
    between = _prompts_between(p, constants, added, max(0.0, p.running - 1))
    answer = load.output_len * step + between
    tpot = answer / load.output_len
    busy = min(0.9, between / answer)
    # Prompts queue behind each other, at the start all of them; clients beyond the memory wait for whole responses.
    first = prompt * (1 + busy / (2 * (1 - busy)) + constants["queue"] * (p.running - 1)) + step / 2
    first += constants["arrive"] * p.serving.engine.arrive + p.waiting / p.running * answer
    latency = first + (load.output_len - 1) * tpot
    tokens = load.batch * load.output_len / latency
    return {"ttft": first, "tpot": tpot, "decode": step, "latency": latency, "output_tokens_per_s": tokens}


def _full(p: Prepared, constants: Mapping[str, float], added: float, step: float, outside: float) -> dict[str, float]:
    """Waves of as many requests as fit; the last wave has the remaining ones."""
    load = p.load
    wave = _prompts_between(p, constants, added, p.running) + load.output_len * step
    waves = math.floor((p.running + p.waiting) / p.running)
    total = waves * wave
    if p.rest:
        last = seconds(p.serving, p.steps[1], constants, decode=True) + outside
        total += _prompts_between(p, constants, added, p.rest) + load.output_len * last
    total *= constants["load"]
    tokens = (p.running + p.waiting) * load.output_len * p.serving.replicas / total
    return {
        "ttft": total / 2,
        "tpot": wave / load.output_len,
        "decode": step,
        "latency": wave,
        "output_tokens_per_s": tokens,
    }
