"""With `serve.invariant` a request is answered with the same bits whatever the schedule, batch, chunks, pages, preemptions and
prefix hits; and they are those of the trainer's forward pass over whole sequences, alone or packed. No tolerance anywhere."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import FAMILIES, LONGEST, VOCAB, answers, model_of, tokens_of
from torch import Tensor

from shardwise.checkpoint.weights import load_model
from shardwise.cli.main import main
from shardwise.model import Transformer
from shardwise.model.invariant.network import make_invariant, token_logprobs
from shardwise.run import UserError, read_served, run_from_dict
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.engine import Engine, make_engine
from shardwise.serve.request import Logprob, Output, Request, Sampling
from shardwise.serve.runner import Runner
from shardwise.train.loop import train

PROMPTS = [tuple(random.Random(n).randrange(VOCAB) for _ in range(length)) for n, length in enumerate((1, 5, 18, 28))]
PROMPTS.append(PROMPTS[2][:17] + PROMPTS[1])  # begins as another does
SAMPLING = (Sampling(0.0, logprobs=2), Sampling(1.3, seed=5, logprobs=0), Sampling(0.8, top_p=0.9, seed=6, logprobs=3))
ANSWER = 9


@functools.cache
def invariant_model(family: str, dtype: torch.dtype) -> Transformer:
    model = copy.deepcopy(model_of(family, dtype))
    make_invariant(model)
    return model


def answers_of(draw: random.Random, family: str, dtype: torch.dtype) -> dict[int, tuple[list[int], list[Logprob]]]:
    """What a drawn engine answers to some of the prompts, which come at drawn moments beside others."""
    page, sequences = draw.choice([1, 4, 16, 64]), draw.choice([1, 2, 3, 8])
    settings = ServeConfig(
        max_sequences=sequences, max_step_tokens=max(sequences, draw.choice([1, 3, 7, 16, 64])), page_tokens=page,
        prefix_cache=draw.random() < 0.7, preemption=draw.choice(["recompute", "swap"]),
    )  # fmt: skip
    fewest = -(-LONGEST // page) + 2
    pages = draw.randint(fewest, 2 * fewest)
    runner = Runner(invariant_model(family, dtype), pages, page, sequences, LONGEST, dtype)
    engine = Engine(runner, settings, pages, ahead=draw.random() < 0.5, host_pages=draw.choice([0, 100]))
    coming: list[Request] = []
    for n, prompt in enumerate(PROMPTS):
        if draw.random() < 0.7:
            coming.append(Request(str(n), prompt, ANSWER, SAMPLING[n % len(SAMPLING)], priority=draw.choice([0, 0, 1])))
        if draw.random() < 0.5:
            other = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 30)))
            coming.append(Request(f"other {n}", other, draw.randint(1, 12), Sampling(1.0)))
    draw.shuffle(coming)
    found: dict[str, list[Output]] = {}
    while coming or not engine.idle:
        while coming and (engine.idle or draw.random() < 0.5):
            engine.add(coming.pop())
        for output in engine.step():
            found.setdefault(output.request, []).append(output)
    return {
        int(name): ([t for o in each for t in o.tokens], [p for o in each for p in o.logprobs])
        for name, each in found.items()
        if name.isdigit()
    }


@torch.inference_mode()
def trained_logprobs(family: str, dtype: torch.dtype, texts: list[tuple[int, ...]], alone: bool) -> list[Tensor]:
    """The logprob of each further token of texts by the forward pass of training: each in a row, or packed one after the other."""
    model = invariant_model(family, dtype)
    if alone:
        logits = [model(torch.tensor([text])).result[0] for text in texts]
    else:
        rows = torch.tensor([[token for text in texts for token in text]])
        documents = torch.tensor([[n for n, text in enumerate(texts) for _ in text]])
        positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
        logits = list(model(rows, positions, documents).result[0].split([len(text) for text in texts]))
    return [token_logprobs(each[:-1], torch.tensor(text[1:])) for each, text in zip(logits, texts, strict=True)]


def check(seed: str, family: str, dtype: torch.dtype, schedules: int) -> None:
    answered: dict[int, tuple[list[int], list[Logprob]]] = {}
    for number in range(10 * schedules):
        if number >= schedules and len(answered) >= 3:  # which prompts are asked for is drawn too
            break
        for n, answer in answers_of(random.Random(f"{seed} {number}"), family, dtype).items():
            assert answered.setdefault(n, answer) == answer
    assert len(answered) >= 3
    texts = [PROMPTS[n] + tuple(tokens) for n, (tokens, _) in answered.items()]
    for alone in (True, False):
        for (n, (tokens, logprobs)), own in zip(
            answered.items(), trained_logprobs(family, dtype, texts, alone), strict=True
        ):
            assert len(tokens) == ANSWER
            assert [each.logprob for each in logprobs] == own[len(PROMPTS[n]) - 1 :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.drawn(3)
def test_an_answer_is_the_same_bits_whatever_the_schedule(family: str, request: pytest.FixtureRequest) -> None:
    check(f"{request.config.getoption('--seed')} {family}", family, torch.float32, 2)


@pytest.mark.large("every dtype, and many more schedules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_dtype(family: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    check(f"{request.config.getoption('--seed')} {family} {dtype}", family, dtype, 12)


def test_a_run_in_16_bits_is_served_with_the_bits_of_its_training(tmp_path: Path) -> None:
    """Also where the network reads parameters before they are rounded: routers, and positions that are learned."""
    model = dict(
        layers=2, hidden=32, heads=4, vocab=257, position="learned", experts=4, experts_per_token=2, norm="layernorm"
    )
    source = tmp_path / "source.txt"
    source.write_text("def one(): return 1\n" * 40)
    assert main(["data", "build", str(source), "--out", str(tmp_path / "set")]) == 0
    run = run_from_dict(
        dict(
            model=model,
            data=dict(sets=[str(tmp_path / "set")]),
            train=dict(
                steps=1, seq_len=32, global_batch=2, eval_every=0, device="cpu", dtype="bfloat16", invariant=True
            ),
            serve=dict(invariant=True, memory_gib=0.01, page_tokens=8, max_sequences=4, max_step_tokens=7),
        )
    )
    train(run, tmp_path / "run")
    prompts = [tuple(b"def one"), tuple(b"d"), tuple(b"return 1\ndef one():")]
    asked = [Request(str(n), prompt, 6, Sampling(0.9, seed=n, logprobs=0)) for n, prompt in enumerate(prompts)]
    found = answers(make_engine(tmp_path / "run", run), asked)
    trained, _ = load_model(tmp_path / "run")
    trained.dtype = torch.bfloat16
    make_invariant(trained)
    for n, prompt in enumerate(prompts):
        text = prompt + tuple(tokens_of(found[str(n), 0]))
        logits = trained(torch.tensor([text])).result[0]
        assert logits.requires_grad
        own = token_logprobs(logits[:-1], torch.tensor(text[1:]))[len(prompt) - 1 :]
        assert own.tolist() == [each.logprob for output in found[str(n), 0] for each in output.logprobs]


@pytest.mark.parametrize(
    ("model", "serve", "phrase"),
    [
        ({}, dict(kv_dtype="float64"), "serve.kv_dtype"),
        (dict(experts=4, experts_per_token=2, expert_capacity=1.5), {}, "expert_capacity"),
    ],
)
def test_what_can_not_be_had_is_refused(
    model: dict[str, Any], serve: dict[str, Any], phrase: str, tmp_path: Path
) -> None:
    small = dict(layers=1, hidden=16, heads=2, vocab=40)
    run = run_from_dict(dict(model=small | model, train=dict(device="cpu"), serve=dict(invariant=True) | serve))
    with pytest.raises(UserError, match=phrase):
        make_engine(tmp_path, run)


def test_ranks_that_add_up_parts_of_a_sum_are_refused() -> None:
    words = ["model.heads=4", "model.hidden=32", "serve.invariant=true"]
    with pytest.raises(UserError, match="2 ranks add up parts"):
        read_served(None, [*words, "layout.tensor=2"])
    assert read_served(None, [*words, "layout.pipeline=2", "layout.replicate=2"]).serve.invariant
