"""Whatever the schedule, a request is answered with the tokens and logprobs of the forward pass without a cache: for drawn
arrivals, chunks, page sizes, preemptions, prefix hits, forks and aborts, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_schedules import TOKENS, check_schedule
from engines import FAMILIES, VOCAB, answers, engine_of, expected, expected_of_prompt, tokens_of
from patience import HANG_SECONDS

from shardwise.measure.counts.memory import Storages
from shardwise.plan.serving.pool import PROMPT_ROWS, activation_bytes
from shardwise.run import ModelConfig, Run, UserError
from shardwise.run.derive import derive_model
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.prompts import Wanted, score_prompts
from shardwise.serve.request import Request, Sampling
from shardwise.serve.runner import Launched, Row, Runner
from shardwise.serve.speculate.draft import DraftModel

SCHEDULES, LARGE = 60, 1_000
"""How many the tiers play; `schedules.py --count 10000` is the campaign."""


@pytest.mark.parametrize("part", range(5))
@pytest.mark.drawn(1)
def test_drawn_schedules_answer_as_the_uncached_model(part: int, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--seed")
    assert sum(check_schedule(f"{seed} {part} {number}").stats.prefix_hits for number in range(SCHEDULES // 5))


@pytest.mark.parametrize("number", [686, 3456, 5446])
@pytest.mark.drawn(1)
def test_logprobs_of_a_step_are_those_its_own_requests_asked_for(number: int) -> None:
    """In these a sequence is preempted while its token is under way, and its slot is given to a request without logprobs."""
    then = [name for name in FAMILIES if name != "bloom"]  # of which they were drawn
    assert check_schedule(f"schedules 1 {number}", then, of_prompts=False).stats.preemptions


@pytest.mark.large("a thousand drawn schedules")
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_drawn_schedules(part: int, request: pytest.FixtureRequest) -> None:
    for number in range(LARGE // 10):
        check_schedule(f"{request.config.getoption('--seed')} large {part} {number}")


@pytest.mark.large("the campaign's own script, which plays what the tests above play")
def test_the_script_of_drawn_schedules_says_what_was_met() -> None:
    script = Path(__file__).with_name("schedules.py")
    words = [sys.executable, str(script), "--count", "6", "--at-once", "1", "--seed", "5", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["passed"], found["failed"]) == (6, [])
    assert found["steps"] > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.drawn(3)
def test_float32_too(family: str) -> None:
    settings = ServeConfig(max_sequences=3, max_step_tokens=4, page_tokens=4)
    prompts = [(5, 9, 3, 7, 1, 2), (4,), (8, 8, 1)]
    requests = [Request(str(n), prompt, TOKENS, Sampling(0.0)) for n, prompt in enumerate(prompts)]
    found = answers(engine_of(family, settings, 64, torch.float32), requests)
    for n, prompt in enumerate(prompts):
        assert tokens_of(found[str(n), 0]) == expected(family, prompt, TOKENS, torch.float32)[0]


def test_short_prompts_are_replayed_and_gone_on_with_before_they_are_read() -> None:
    settings = ServeConfig(max_sequences=4, max_step_tokens=64, page_tokens=4)
    engine = engine_of("llama", settings, 64, ahead=True, replays=True)
    prompts = [(5, 9, 3, 7, 1, 2), (4,), (8, 8, 1)]
    found = answers(engine, [Request(str(n), prompt, 8, Sampling(0.0)) for n, prompt in enumerate(prompts)])
    assert any(shared for _, shared in engine.runner.graphs)  # type: ignore[union-attr]
    for n, prompt in enumerate(prompts):
        assert tokens_of(found[str(n), 0]) == expected("llama", prompt, 8)[0]


def test_draws_depend_on_the_seed_and_the_answer_alone() -> None:
    """Not on company, pages, chunks or look-ahead."""
    prompt = (5, 9, 3, 7, 1, 2)
    asked = Request("one", prompt, 20, Sampling(1.5, seed=3), n=3)
    made = []
    for budget, page, ahead, company in ((64, 16, False, 0), (3, 2, True, 4)):
        engine = engine_of(
            "llama", ServeConfig(max_sequences=3, max_step_tokens=budget, page_tokens=page), 200, ahead=ahead
        )
        others = [Request(f"o{n}", prompt[: n + 1], 9, Sampling(1.0)) for n in range(company)]
        found = answers(engine, [*others, asked])
        made.append([tokens_of(found["one", index]) for index in range(3)])
    assert made[0] == made[1]
    assert len({tuple(row) for row in made[0]}) == 3


def test_stop_tokens_end_an_answer_and_belong_to_it() -> None:
    tokens, _ = expected("llama", (5, 9, 3), TOKENS)
    end = tokens[4]
    for ahead in (False, True):
        engine = engine_of("llama", ServeConfig(max_sequences=2, page_tokens=4), 64, ahead=ahead)
        stops = frozenset({end})
        found = answers(
            engine,
            [
                Request("stops", (5, 9, 3), TOKENS, Sampling(0.0), stop_tokens=stops),
                Request("goes on", (5, 9, 3), TOKENS, Sampling(0.0), stop_tokens=stops, ignore_end=True),
            ],
        )
        assert tokens_of(found["stops", 0]) == tokens[: tokens.index(end) + 1]
        assert found["stops", 0][-1].finish == "stop"
        assert tokens_of(found["goes on", 0]) == tokens


@torch.inference_mode()
def test_logprobs_of_the_prompt() -> None:
    from engines import model_of

    prompt = (5, 9, 3, 7, 1, 2, 8, 8)
    rows = model_of("llama")(torch.tensor([prompt])).result[0].log_softmax(-1)
    for budget in (64, 3):
        engine = engine_of("llama", ServeConfig(max_sequences=2, max_step_tokens=budget, page_tokens=4), 64)
        found = answers(engine, [Request("r", prompt, 2, Sampling(0.0, prompt_logprobs=2))])
        first, *others = found["r", 0][0].prompt_logprobs
        assert first is None
        assert len(others) == 7
        for n, each in enumerate(others):
            assert each is not None
            assert each.token == prompt[n + 1]
            assert each.logprob == pytest.approx(float(rows[n, prompt[n + 1]]), abs=1e-9)
            assert each.top[0][1] == pytest.approx(float(rows[n].max()), abs=1e-9)


def test_logprobs_of_a_prompt_that_is_computed_again_in_other_chunks() -> None:
    """Beside one that decodes it gets 4 tokens a step, until that one needs its pages; then it begins anew with 5 tokens a step."""
    prompt = tuple(range(3, 23)) * 2
    engine = engine_of("llama", ServeConfig(max_sequences=2, max_step_tokens=5, page_tokens=4, prefix_cache=False), 14)
    engine.add(Request("first", prompt[:4], 30, Sampling(0.0)))
    outputs = [output for _ in range(3) for output in engine.step()]
    engine.add(Request("late", prompt, 2, Sampling(0.0, prompt_logprobs=1), priority=1))
    while not engine.idle:
        outputs += engine.step()
    assert engine.stats().preemptions == 1
    found = next(output.prompt_logprobs for output in outputs if output.request == "late")
    assert [each and each.token for each in found] == [None, *prompt[1:]]
    assert [each.logprob for each in found[1:] if each] == pytest.approx(expected_of_prompt("llama", prompt), abs=1e-9)


def test_logprobs_of_a_long_prompt_are_made_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its logits, in float32 and with their logarithms, would not fit a GPU beside the pages."""
    from shardwise.serve import prompts

    monkeypatch.setattr(prompts, "PROMPT_ROWS", 4)
    made, make = [], Runner._logits

    def counted(self: Runner, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made.append(len(x))
        return make(self, x, weight)

    monkeypatch.setattr(Runner, "_logits", counted)
    prompt = tuple(range(3, 33))
    for top in (0, 2):
        engine = engine_of("llama", ServeConfig(max_sequences=2, page_tokens=4), 64)
        found = answers(engine, [Request("r", prompt, 2, Sampling(0.0, prompt_logprobs=top))])
        _, *others = found["r", 0][0].prompt_logprobs
        assert [each.logprob for each in others if each] == pytest.approx(expected_of_prompt("llama", prompt), abs=1e-9)
        assert {len(each.top) for each in others if each} == {top}
    assert max(made) == 4


@pytest.mark.parametrize("invariant", [False, True])
def test_the_plan_has_room_for_the_logits_of_prompts(invariant: bool) -> None:
    hidden, vocab, tokens = 64, 3_000, 2 * PROMPT_ROWS + 1
    model = derive_model(ModelConfig(layers=1, hidden=hidden, heads=1, vocab=vocab), 64)
    run = Run(model=model, serve=ServeConfig(max_sequences=1, max_step_tokens=tokens, invariant=invariant))
    run = replace(run, train=replace(run.train, dtype="bfloat16"))
    rows, weight = torch.ones(tokens, hidden, dtype=torch.bfloat16), torch.ones(hidden, vocab, dtype=torch.bfloat16)
    wanted = Wanted(0, [1] * (tokens - 1), 2)
    with Storages() as storages:
        score_prompts(rows, [(0, wanted)], lambda some: some @ weight, invariant)
    assert PROMPT_ROWS * vocab * 4 < storages.peak <= activation_bytes(run)


@pytest.mark.parametrize("ahead", [False, True])
def test_logprobs_of_a_prompt_are_made_once(ahead: bool) -> None:
    """Not again where a prompt is computed again, be it that of a fork whose pages were needed."""
    prompt = tuple(range(3, 20))
    settings = ServeConfig(max_sequences=4, max_step_tokens=8, page_tokens=2, prefix_cache=False)
    engine, asked = engine_of("llama", settings, 22, ahead=ahead), []
    launch = engine.runner.launch

    def noted(rows: list[Row], masks: np.ndarray | None = None, keep_logits: bool = False) -> Launched:
        asked.extend([token for row in rows if row.wanted for token in row.wanted.tokens])
        assert keep_logits == any(row.wanted for row in rows)
        return launch(rows, masks, keep_logits)

    engine.runner.launch = noted  # type: ignore[method-assign]
    requests = [Request("r", prompt, 16, Sampling(0.0, prompt_logprobs=1), n=3), Request("other", prompt[:4], 20)]
    found = answers(engine, requests)
    assert engine.stats().computed_tokens > 3 * len(prompt) + 16 * 3 + 24, "prompts were computed again"
    assert asked == list(prompt[1:])
    own = found["r", 0][0].prompt_logprobs
    assert [each.logprob for each in own[1:] if each] == pytest.approx(expected_of_prompt("llama", prompt), abs=1e-9)


def test_room_for_swapped_pages_is_allocated_before_the_first_request() -> None:
    """In pinned memory that takes seconds."""
    settings = ServeConfig(max_sequences=2, page_tokens=4, preemption="swap", speculate="draft")
    engine = engine_of("llama", settings, 64, host_pages=5)
    engine.warm()
    assert isinstance(engine.drafter, DraftModel)
    for runner in (engine.runner, engine.drafter.runner):
        assert {len(tensor) for tensor in runner.host._host} == {5}  # type: ignore[union-attr]


def test_a_reader_may_end_an_answer() -> None:
    engine = engine_of("llama", ServeConfig(max_sequences=2, page_tokens=4), 64)
    engine.add(Request("r", (5, 9, 3), 30, Sampling(0.0), n=2))
    for _ in range(4):
        engine.step()
    engine.finish("r", 0)
    assert len(engine.answers["r"]) == 1
    engine.finish("r", 0)
    engine.abort("r")
    assert [output.finish for output in engine.step()] == ["abort"]
    assert engine.idle
    assert engine.stats().pages_used == 0


def test_what_can_never_run_is_refused_with_a_sentence() -> None:
    engine = engine_of("llama", ServeConfig(max_sequences=2, page_tokens=4), 8)
    with pytest.raises(UserError, match="64 at most"):
        engine.add(Request("r", (1,) * 60, 10))
    with pytest.raises(UserError, match="do not fit the 7 pages"):
        engine.add(Request("r", (1,) * 30, 10))
    with pytest.raises(UserError, match="below the vocabulary"):
        engine.add(Request("r", (1, VOCAB), 10))
    engine.add(Request("r", (1,), 2))
    with pytest.raises(UserError, match="already"):
        engine.add(Request("r", (1,), 2))


@pytest.mark.parametrize(("family", "pages"), [("llama", 8), ("llama", 64), ("window", 8)])
def test_the_longest_sequence_is_one_that_fits_the_pages(family: str, pages: int) -> None:
    """Of the length that the engine says, and none longer; a window needs few pages at any length."""
    engine = engine_of(family, ServeConfig(max_sequences=2, page_tokens=4), pages)
    assert engine.max_tokens == (7 * 4 + 1 if (family, pages) == ("llama", 8) else 64)
    assert engine.reasons(Request("longer", (1,) * 20, engine.max_tokens - 19))
    prompt = (5, 9, 3) * 7
    found = answers(engine, [Request("longest", prompt, engine.max_tokens - len(prompt), Sampling(0.0))])
    assert len(tokens_of(found["longest", 0])) == engine.max_tokens - len(prompt)


def test_scores_that_are_no_numbers_end_their_answer_only() -> None:
    engine = engine_of("llama", ServeConfig(max_sequences=4, page_tokens=4), 64)
    embed = engine.runner.model.embed
    assert embed is not None
    row = embed.weight[7].clone()
    embed.weight[7] = float("nan")
    try:
        found = answers(
            engine, [Request("bad", (5, 7), 4, Sampling(0.0)), Request("good", (5, 9, 3), 4, Sampling(0.0))]
        )
    finally:
        embed.weight[7] = row
    assert found["bad", 0][-1].finish == "abort"
    assert tokens_of(found["good", 0]) == expected("llama", (5, 9, 3), TOKENS)[0][:4]


def test_the_first_answer_may_be_ended_before_the_others_begin() -> None:
    engine = engine_of("llama", ServeConfig(page_tokens=4, max_sequences=4, max_step_tokens=8), 40)
    engine.add(Request("one", (3, 1, 4, 1, 5), 5, Sampling(0.0), n=2))
    engine.finish("one", 0)
    found = answers(engine, [])
    assert list(found) == [("one", 1)]
    assert tokens_of(found["one", 1]) == expected("llama", (3, 1, 4, 1, 5), 5)[0]
    assert engine.stats().pages_used == 0
