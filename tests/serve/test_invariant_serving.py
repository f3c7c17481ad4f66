"""With `serve.invariant` a request is answered with the same bits whatever the schedule, batch, chunks, pages, preemptions and
prefix hits; and they are those of the trainer's forward pass over whole sequences, alone or packed. No tolerance anywhere."""

from __future__ import annotations

import copy
import functools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import FAMILIES, LONGEST, VOCAB, answers, model_of, tokens_of
from many_ranks import share_of
from parallel_pool import RankPool
from torch import Tensor

from shardwise.checkpoint.weights import load_model
from shardwise.cli.main import main
from shardwise.model import Transformer
from shardwise.model.invariant.network import make_invariant, token_logprobs
from shardwise.parallel.inference import Peers
from shardwise.run import LayoutConfig, Run, UserError, read_served, run_from_dict
from shardwise.run.sections.serve import ServeConfig
from shardwise.serve.engine import Engine, make_engine
from shardwise.serve.many import taking_part
from shardwise.serve.replicas import Replicas
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


Answered = dict[int, tuple[list[int], list[Logprob]]]
"""The tokens and logprobs of answers, by the number of the prompt."""


def drawn_settings(draw: random.Random) -> tuple[ServeConfig, int]:
    """Of an engine, and its pages."""
    page, sequences = draw.choice([1, 4, 16, 64]), draw.choice([1, 2, 3, 8])
    settings = ServeConfig(
        max_sequences=sequences, max_step_tokens=max(sequences, draw.choice([1, 3, 7, 16, 64])), page_tokens=page,
        prefix_cache=draw.random() < 0.7, preemption=draw.choice(["recompute", "swap"]),
    )  # fmt: skip
    fewest = -(-LONGEST // page) + 2
    return settings, draw.randint(fewest, 2 * fewest)


def answers_of(draw: random.Random, family: str, dtype: torch.dtype) -> Answered:
    """What a drawn engine answers."""
    settings, pages = drawn_settings(draw)
    sequences, page = settings.max_sequences, settings.page_tokens
    runner = Runner(invariant_model(family, dtype), pages, page, sequences, LONGEST, dtype)
    engine = Engine(runner, settings, pages, ahead=draw.random() < 0.5, host_pages=draw.choice([0, 100]))
    return asked(draw, engine)


def asked(draw: random.Random, engine: Engine | Replicas) -> Answered:
    """What an engine answers to some of the prompts, which come at drawn moments beside others."""
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


def answers_on_ranks(
    rank: int, axes: dict[str, int], family: str, dtype: torch.dtype, seeds: list[str]
) -> list[Answered]:
    """The same of engines on ranks, one for each seed; nothing where a rank does not lead."""
    layout, found = LayoutConfig(**axes), []
    peers = Peers(layout, invariant=True)
    for seed in seeds:
        draw = random.Random(seed)
        settings, pages = drawn_settings(draw)
        settings = replace(settings, invariant=True)
        runner = share_of(family, layout, settings, pages, peers, dtype, "cpu")
        run = Run(model=runner.model.config, layout=layout, serve=settings)
        with taking_part(runner, run, pages, draw.choice([0, 100]), "127.0.0.1") as engine:
            found += [asked(draw, engine)] if engine is not None else []
    return found


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
    answered: Answered = {}
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
@pytest.mark.drawn(2)
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


@pytest.mark.parametrize(
    ("axes", "family"),
    [
        (dict(tensor=4), "llama"),
        (dict(tensor=2, pipeline=2), "gpt"),
        (dict(tensor=2, shard=2, expert=4), "deepseek"),
        (dict(pipeline=2), "qwen"),
        (dict(shard=2, expert=2), "mixtral"),
        (dict(shard=2, expert=2, pipeline=2), "deepseek"),
    ],
    ids=lambda case: case if isinstance(case, str) else " ".join(f"{axis}={size}" for axis, size in case.items()),
)
@pytest.mark.drawn(group="ranks that serve")
def test_ranks_give_the_same_bits_whatever_the_schedule(
    ranks: RankPool, axes: dict[str, int], family: str, request: pytest.FixtureRequest
) -> None:
    """Those of one device, where no tensor ranks add up parts of a sum; else the same tokens, and logprobs to rounding."""
    seeds = [f"{request.config.getoption('--seed')} {family} {n}" for n in range(3)]
    world = math.prod(size for axis, size in axes.items() if axis != "expert")
    found = [each for part in ranks.run(world, answers_on_ranks, axes, family, torch.float64, seeds) for each in part]
    alone = [answers_of(random.Random(seed), family, torch.float64) for seed in seeds]
    answered: Answered = {}
    for each in found:
        for n, answer in each.items():
            assert answered.setdefault(n, answer) == answer
    one_device = {n: answer for each in alone for n, answer in each.items()}
    common = answered.keys() & one_device.keys()
    assert len(common) >= 2
    for n in common:
        (tokens, logprobs), (expected, known) = answered[n], one_device[n]
        assert tokens == expected
        assert [p.logprob for p in logprobs] == pytest.approx([p.logprob for p in known], rel=1e-9)
        assert "tensor" in axes or logprobs == known


def test_columns_of_experts_on_several_ranks_are_refused() -> None:
    words = ["model.heads=4", "model.hidden=32", "serve.invariant=true"]
    assert read_served(None, [*words, "layout.tensor=2", "layout.pipeline=2"]).serve.invariant
    words += ["model.experts=4", "model.experts_per_token=2", "layout.tensor=2"]
    with pytest.raises(UserError, match=r"serve\.invariant needs whole experts; layout\.expert = 2"):
        read_served(None, words)
    assert read_served(None, [*words, "layout.expert=2"]).serve.invariant
