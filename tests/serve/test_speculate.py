"""Speculation changes how many steps an answer takes and nothing of the answer: the same tokens and logprobs for every family and
whatever is asked of sampling, with and without it; and pages come back."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Literal

import engines
import numpy as np
import pytest
import torch
from engines import FAMILIES, answers, engine_of, expected, model_of, tokens_of

from shardwise.model.invariant.network import make_invariant
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.engine import Engine
from shardwise.serve.request import Output, Request, Sampling, Stats
from shardwise.serve.runner import Runner
from shardwise.serve.speculate.ngram import NgramIndex

Way = Literal["ngram", "draft"]
SETTINGS = ServeConfig(max_sequences=4, max_step_tokens=24, page_tokens=4, draft_tokens=3, ngram_min=1, ngram_max=3)
PROMPTS = [(5, 9, 3, 7, 1, 2, 5, 9, 3), (4,), (8, 8, 1, 8, 8)]
SMALL = ("gpt", "window", "deepseek")
LARGE = pytest.mark.large("every family, of which the small tier has the most different")
CASES = [
    pytest.param(family, way, id=f"{family} {way}", marks=() if family in SMALL else LARGE)
    for family in FAMILIES
    for way in ("ngram", "draft")
]


def accepted(engine: Engine) -> int:
    return sum(engine.stats().accepted_at)


@pytest.mark.parametrize(("family", "way"), CASES)
@pytest.mark.drawn(2, "way")
def test_greedy_answers_are_those_of_the_uncached_model(family: str, way: Way) -> None:
    count, right = 20, 0
    for drafts in (1, 4) if family == "gpt" else (3,):
        engine = engine_of(family, replace(SETTINGS, speculate=way, draft_tokens=drafts), 64)
        asked = [
            Request(str(n), prompt, count, Sampling(0.0, logprobs=0), n=1 + n % 2) for n, prompt in enumerate(PROMPTS)
        ]
        found = answers(engine, asked)
        for n, prompt in enumerate(PROMPTS):
            tokens, logprobs = expected(family, prompt, count)
            for index in range(1 + n % 2):
                assert tokens_of(found[str(n), index]) == tokens
                own = [each.logprob for output in found[str(n), index] for each in output.logprobs]
                assert own == pytest.approx(logprobs, abs=1e-9)
        assert engine.stats().pages_used == 0
        assert len(engine.stats().drafted_at) == drafts
        right += accepted(engine)
    assert right >= 2


ASKED = {
    "temperature": Sampling(1.2, seed=1),
    "cuts": Sampling(1.5, top_k=20, top_p=0.95, min_p=0.01, seed=2),
    "penalties": Sampling(1.0, presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2, seed=3, logprobs=2),
    "greedy penalties": Sampling(0.0, frequency_penalty=3.0, repetition_penalty=1.5),
    "biases": Sampling(1.0, logit_bias={7: 30.0, 3: 29.0}, seed=4, logprobs=0),
}


@pytest.mark.parametrize("way", ["ngram", "draft"])
@pytest.mark.drawn(1)
def test_draws_are_the_same_tokens_as_without(way: Way) -> None:
    """Not only as likely: whatever is asked of sampling, beside each other in one batch."""

    def ask(settings: ServeConfig, ahead: bool) -> tuple[Engine, dict[tuple[str, int], list[Output]]]:
        engine = engine_of("qwen", settings, 64, ahead=ahead)
        requests = [
            Request(name, PROMPTS[0], 24, sampling, n=1 + (sampling.seed == 1)) for name, sampling in ASKED.items()
        ]
        return engine, answers(engine, requests)

    _, plain = ask(SETTINGS, True)
    engine, found = ask(replace(SETTINGS, speculate=way), False)
    assert accepted(engine) > 10
    for key in plain:
        assert tokens_of(found[key]) == tokens_of(plain[key]), key
        logprobs = [[each for output in made[key] for each in output.logprobs] for made in (found, plain)]
        assert [each.logprob for each in logprobs[0]] == pytest.approx([each.logprob for each in logprobs[1]], abs=1e-9)


class Turns:
    """Tokens of four sets by turns; accepting a token that is not allowed is an error."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def allowed(self) -> np.ndarray:
        bits = np.arange(64) % 4 == self.at % 4
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token % 4 == self.at % 4
        self.at += 1

    def copy(self) -> Turns:
        return Turns(self.at)


@pytest.mark.parametrize("way", ["ngram", "draft"])
def test_grammars_are_followed_along_guesses(way: Way) -> None:
    made = []
    for settings in (SETTINGS, replace(SETTINGS, speculate=way)):
        engine = engine_of("llama", settings, 64)
        grammars = Turns(), Turns()
        asked = [
            Request("form", PROMPTS[0], 24, Sampling(1.0, seed=5), n=2, grammars=grammars),
            Request("free", PROMPTS[0], 24, Sampling(0.0)),
        ]
        found = answers(engine, asked)
        made.append([tokens_of(found["form", 0]), tokens_of(found["form", 1]), tokens_of(found["free", 0])])
        assert [token % 4 for token in made[-1][0]] == [n % 4 for n in range(24)]
        assert grammars[0].at == grammars[1].at == 24
    assert made[0] == made[1]
    assert accepted(engine) > 0


def test_an_answer_ends_within_guesses() -> None:
    """At a stop token and at its limit, though more was accepted."""
    tokens, _ = expected("gpt", PROMPTS[0], 20)
    end = next(n for n in range(8, 20) if tokens.index(tokens[n]) == n)
    engine = engine_of("gpt", replace(SETTINGS, speculate="draft", draft_tokens=7), 64)
    stops = frozenset({tokens[end]})
    found = answers(
        engine,
        [
            Request("stops", PROMPTS[0], 30, Sampling(0.0), stop_tokens=stops),
            Request("ends", PROMPTS[0], 7, Sampling(0.0)),
        ],
    )
    assert tokens_of(found["stops", 0]) == tokens[: end + 1]
    assert found["stops", 0][-1].finish == "stop"
    assert tokens_of(found["ends", 0]) == tokens[:7]
    assert max(len(output.tokens) for output in found["stops", 0]) > 1


def test_a_draft_that_is_the_model_is_always_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever temperature: it draws with the same noise. Then a step gives all guesses and a token more."""
    monkeypatch.setattr(engines, "draft_of", model_of)
    engine = engine_of("llama", replace(SETTINGS, speculate="draft"), 64)
    found = answers(engine, [Request("r", PROMPTS[0], 21, Sampling(1.5, top_k=30, seed=1))])
    stats = engine.stats()
    assert stats.drafted_at == stats.accepted_at == (5, 5, 5)
    assert [len(output.tokens) for output in found["r", 0]] == [1, 4, 4, 4, 4, 4]


def test_scores_of_a_draft_that_are_no_numbers_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = copy.deepcopy(model_of("llama"))
    assert broken.embed is not None
    broken.embed.weight[:] = float("nan")
    monkeypatch.setattr(engines, "draft_of", lambda family, dtype: broken)
    engine = engine_of("llama", replace(SETTINGS, speculate="draft"), 64)
    found = answers(engine, [Request("r", PROMPTS[0], 12, Sampling(0.0))])
    assert tokens_of(found["r", 0]) == expected("llama", PROMPTS[0], 12)[0]


def test_batch_invariance_holds_with_guesses() -> None:
    """The same bits of logprobs, alone and in company, with guesses and without."""
    model = copy.deepcopy(model_of("llama", torch.float32))
    make_invariant(model)
    bits = []
    for speculate, company in (("none", 0), ("ngram", 0), ("ngram", 2)):
        settings = replace(SETTINGS, speculate=speculate, invariant=True)  # type: ignore[arg-type]
        engine = Engine(Runner(model, 64, 4, 4, 64, torch.float32), settings, 64)
        others = [Request(f"o{n}", PROMPTS[n + 1], 15, Sampling(0.0)) for n in range(company)]
        found = answers(engine, [*others, Request("r", PROMPTS[0], 20, Sampling(0.0, logprobs=1))])
        bits.append([each for output in found["r", 0] for each in output.logprobs])
    assert bits[0] == bits[1] == bits[2]
    assert accepted(engine) > 0


def test_lookup_finds_what_brute_force_finds() -> None:
    draw = random.Random(3)
    for _ in range(150):
        least = draw.randint(1, 3)
        most, vocab, count = draw.randint(least, 5), draw.randint(1, 5), draw.randint(1, 6)
        index, tokens = NgramIndex(least, most), draw.choices(range(vocab), k=draw.randint(1, 6))
        for _ in range(12):
            found = index.guess(tokens, count)
            best = (0, 0)
            for at in range(least, len(tokens)):
                same = 0
                while same < min(most, at) and tokens[at - 1 - same] == tokens[-1 - same]:
                    same += 1
                if same >= least:
                    best = max(best, (same, at))
            text = list(tokens)
            if best[0]:
                for n in range(count):
                    text.append(text[best[1] + n])
            assert found == text[len(tokens) :]
            tokens += draw.choices(range(vocab), k=draw.randint(0, 3))


def test_figures_of_replicas_add_up() -> None:
    one, two = (
        Stats(running=1, drafted_at=(5, 3), accepted_at=(2, 1)),
        Stats(running=2, drafted_at=(1,), accepted_at=(1,)),
    )
    whole = Stats.together([one, two, Stats()])
    assert (whole.running, whole.drafted_at, whole.accepted_at) == (3, (6, 3), (3, 1))
