"""Drawn schedules: random arrivals, chunks, page sizes, preemptions, prefix hits, forks and aborts, whose answers must be those of
the forward pass without a cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engines import FAMILIES, VOCAB, engine_of, expected, expected_of_prompt, tokens_of

from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.request import Request, Sampling, Stats

TOKENS = 12
MOST = 27 + TOKENS
"""Tokens of the longest request that is drawn."""


def drawn_settings(draw: random.Random) -> tuple[ServeConfig, int, dict[str, Any]]:
    """Settings, pages, and what else an engine is given."""
    page = draw.choice([1, 2, 4, 8, 16])
    sequences = draw.choice([1, 2, 3, 8, 8])
    settings = ServeConfig(
        max_sequences=sequences, max_step_tokens=max(sequences, draw.choice([1, 3, 5, 16, 64])), page_tokens=page,
        prefix_cache=draw.random() < 0.7, preemption=draw.choice(["recompute", "swap"]),
        speculate=draw.choice(["none", "none", "ngram", "draft"]), draft_tokens=draw.choice([1, 2, 4, 7]),
        ngram_min=draw.choice([1, 2]), ngram_max=draw.choice([2, 4]),
    )  # fmt: skip
    fewest = -(-MOST // page) + 2  # so few that sequences are preempted, or enough
    pages = draw.randint(fewest, draw.choice([1, 1, 2, 4]) * fewest)
    more = dict(ahead=draw.random() < 0.5, host_pages=draw.choice([0, 10, 100]), stages=draw.choice([1, 1, 2, 4]))
    more["replays"] = draw.random() < 0.3
    return settings, pages, more


def drawn_requests(draw: random.Random, of_prompts: bool) -> list[Request]:
    """Prompts that begin alike, few enough that what they must give is computed once. `of_prompts`: some ask for logprobs of their
    prompts."""
    base = tuple(random.Random(7).randrange(VOCAB) for _ in range(30))
    found = []
    for n in range(draw.randint(1, 7)):
        kept = draw.choice([0, 3, 8, 15, 24])
        prompt = base[:kept] + tuple(base[(kept + draw.randrange(4)) % 30] for _ in range(1)) + base[:2]
        sampling = Sampling(0.0, logprobs=draw.choice([None, 0, 3]))
        if of_prompts:
            sampling = replace(sampling, prompt_logprobs=draw.choice([None, None, None, 1]))
        found.append(
            Request(
                f"r{n}", prompt, draw.randint(1, TOKENS), sampling, n=draw.choice([1, 1, 1, 2, 3]),
                priority=draw.choice([0, 0, 1]), user=draw.choice(["", "a", "b"]),
            )
        )  # fmt: skip
    return found


def check_answers(engine: Any, draw: random.Random, family: str, of_prompts: bool = True) -> int:
    """Let an engine answer drawn requests, some of which are aborted, and compare. How many were aborted."""
    requests, pace = drawn_requests(draw, of_prompts), draw.choice([0.2, 0.5, 1.0])
    coming, alive, aborted, found = list(requests), [], set(), {}
    while coming or not engine.idle:
        while coming and (engine.idle or draw.random() < pace):
            alive.append(coming.pop(0))
            engine.add(alive[-1])
        if alive and draw.random() < 0.02:
            aborted.add(draw.choice(alive).id)
            for name in aborted:
                engine.abort(name)
        for output in engine.step():
            found.setdefault((output.request, output.index), []).append(output)
    for request in requests:
        tokens, logprobs = expected(family, request.prompt, TOKENS)
        for index in range(request.n):
            got = found[request.id, index]
            made = tokens_of(got)
            if request.id in aborted and got[-1].finish == "abort":
                assert made == tokens[: len(made)]
                continue
            assert made == tokens[: request.max_tokens]
            assert [output.finish for output in got][-1] == "length"
            if request.sampling.prompt_logprobs is not None and index == 0:
                first, *others = got[0].prompt_logprobs
                assert first is None
                assert [each.token for each in others if each] == list(request.prompt[1:])
                want = expected_of_prompt(family, request.prompt)
                assert [each.logprob for each in others if each] == pytest.approx(want, abs=1e-9)
            if request.sampling.logprobs is not None:
                own = [each for output in got for each in output.logprobs]
                assert [each.logprob for each in own] == pytest.approx(logprobs[: len(made)], abs=1e-9)
                assert all(len(each.top) == request.sampling.logprobs for each in own)
    assert engine.stats().pages_used == 0
    return len(aborted)


@dataclass
class Drawn:
    """What one schedule was, and what happened in it."""

    family: str
    settings: ServeConfig
    stats: Stats
    steps: int
    aborted: int


def check_schedule(seed: str, families: Sequence[str] = tuple(FAMILIES), of_prompts: bool = True) -> Drawn:
    """One of them on one device."""
    draw = random.Random(seed)
    family = draw.choice(families)
    settings, pages, more = drawn_settings(draw)
    engine = engine_of(family, settings, pages, **more)
    aborted = check_answers(engine, draw, family, of_prompts)
    assert not engine.by_sequence
    assert not engine.unforked
    assert engine.pool.available_host == engine.pool.host_pages
    return Drawn(family, settings, engine.stats(), engine.scheduler.did.steps, aborted)
