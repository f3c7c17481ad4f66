"""The engine with its kernels and recorded steps on a GPU, against the forward pass without a cache."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
from engines import FAMILIES, answers, tokens_of

from shardwise.model import Transformer, initialize
from shardwise.model.invariant.network import make_invariant
from shardwise.run import ModelConfig
from shardwise.run.derive import derive_model
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.engine import Engine
from shardwise.serve.request import Output, Request, Sampling
from shardwise.serve.runner import Runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB, LONGEST, PAGES = 1000, 512, 400
WIDE: dict[str, dict[str, Any]] = {"wide heads": dict(head_dim=128, kv_heads=1), "wider heads": dict(head_dim=256)}


def make_model(more: dict[str, Any]) -> Transformer:
    config = derive_model(ModelConfig(layers=2, hidden=256, heads=4, vocab=VOCAB, **more), LONGEST)
    model = Transformer(config, dtype=torch.bfloat16).eval()
    initialize(model, config, 0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim > 1:
            parameter *= 4
    return model.bfloat16().cuda()


def logprobs(model: Transformer, text: list[int]) -> torch.Tensor:
    """Of each token after the first."""
    with torch.inference_mode():
        return model(torch.tensor([text[:-1]], device="cuda")).result[0].float().log_softmax(-1)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("family", [*FAMILIES, *WIDE])
def test_answers_are_those_without_a_cache(family: str, kv_dtype: torch.dtype) -> None:
    more = (FAMILIES | WIDE)[family]
    if "experts" in more and kv_dtype != torch.bfloat16:
        pytest.skip("a router may decide otherwise for 8 bits")
    if more.get("position") == "alibi" and kv_dtype != torch.bfloat16:
        pytest.skip("8 bits do not hold the positions beside the keys; a run with both is refused")
    exact = make_model(more).float()
    exact.dtype = torch.float32
    plain = make_model(more)
    draw = random.Random(0)
    prompts = [
        tuple(draw.randrange(VOCAB) for _ in range(count)) for count in (1, 2, 5, 17, 60, 64, 130, 300, 300, 40, 7, 90)
    ]
    settings = ServeConfig(page_tokens=16, max_sequences=8, max_step_tokens=200)
    engine = Engine(Runner(make_model(more), PAGES, 16, 8, LONGEST, kv_dtype), settings, PAGES)
    engine.warm()
    found = answers(
        engine,
        [Request(str(n), prompt, 24, Sampling(0.0, logprobs=1)) for n, prompt in enumerate(prompts)],
    )
    check(found, prompts, exact, plain, kv_dtype)


def check(
    found: dict[tuple[str, int], list[Output]],
    prompts: list[tuple[int, ...]],
    exact: Transformer,
    plain: Transformer,
    kv_dtype: torch.dtype,
) -> None:
    """Tokens are the likeliest, and logprobs are right, to rounding."""
    for n, prompt in enumerate(prompts):
        outputs = found[str(n), 0]
        tokens = tokens_of(outputs)
        assert len(tokens) == 24
        text = [*prompt, *tokens]
        wanted = logprobs(exact, text)[len(prompt) - 1 :]
        rounding = float((logprobs(plain, text)[len(prompt) - 1 :] - wanted).abs().max())
        allowed = 3 * rounding + (0.5 if kv_dtype != torch.bfloat16 else 0.02)
        own = torch.tensor([each.logprob for output in outputs for each in output.logprobs])
        picked = wanted.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].cpu()
        assert float((own - picked).abs().max()) <= allowed
        assert float((wanted.max(-1).values.cpu() - picked).max()) <= allowed


@pytest.mark.parametrize("family", ["llama", "window", "qwen", "mixtral", "deepseek", "wide heads"])
@pytest.mark.parametrize("way", ["ngram", "draft", "none"])
def test_guesses_and_short_prompts_are_replayed(family: str, way: Literal["ngram", "draft", "none"]) -> None:
    """As steps of single tokens that see each other, in one recorded step."""
    more = (FAMILIES | WIDE)[family]
    exact = make_model(more).float()
    exact.dtype = torch.float32
    plain = make_model(more)
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(VOCAB) for _ in range(count)) * 2 for count in (1, 3, 20, 40, 31, 64, 7, 9)]
    settings = ServeConfig(
        page_tokens=16, max_sequences=64, max_step_tokens=200, speculate=way, draft_tokens=3, ngram_min=1, ngram_max=2
    )
    drafts = 0 if way == "none" else 3
    draft = Runner(make_model(more), PAGES, 16, 64, LONGEST, torch.bfloat16, drafts=1) if way == "draft" else None
    runner = Runner(make_model(more), PAGES, 16, 64, LONGEST, torch.bfloat16, drafts=drafts)
    engine = Engine(runner, settings, PAGES, draft=draft)
    answers(engine, [Request("alone", prompts[2], 2, Sampling(0.0))])
    asked = [Request(str(n), prompt, 24, Sampling(0.0, logprobs=1)) for n, prompt in enumerate(prompts)]
    check(answers(engine, asked), prompts, exact, plain, torch.bfloat16)
    drawn = [Request(f"d{n}", prompt, 24, Sampling(1.0, top_k=50, seed=n)) for n, prompt in enumerate(prompts)]
    free = [Request(f"f{n}", prompt, 24, Sampling(1.0, seed=n)) for n, prompt in enumerate(prompts)]
    assert all(len(tokens_of(outputs)) == 24 for outputs in answers(engine, [*drawn, *free]).values())
    assert any(shared for _, shared in runner.graphs)
    stats = engine.stats()
    assert stats.pages_used == 0
    if way == "draft":  # it is the same model, computed in another order
        assert sum(stats.accepted_at) > 0.8 * sum(stats.drafted_at)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_step_of_which_nothing_is_sampled(invariant: bool) -> None:
    """The beginning of a long prompt, alone."""
    more = FAMILIES["llama"]
    exact = make_model(more).float()
    exact.dtype = torch.float32
    plain, model = make_model(more), make_model(more)
    if invariant:
        make_invariant(model)
    prompt = tuple(random.Random(0).randrange(VOCAB) for _ in range(300))
    settings = ServeConfig(page_tokens=16, max_sequences=8, max_step_tokens=64)
    engine = Engine(Runner(model, PAGES, 16, 8, LONGEST, torch.bfloat16), settings, PAGES)
    found = answers(engine, [Request("0", prompt, 24, Sampling(0.0, logprobs=1))])
    check(found, [prompt], exact, plain, torch.bfloat16)
