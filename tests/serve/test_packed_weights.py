"""Engines whose weights have 8 or 4 bits answer what the same network answers without a cache, and hold what the plan says."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import FAMILIES, LONGEST, answers, model_of, tokens_of

from shardwise.checkpoint.weights import load_model
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.model import keep_weights, layer_matrices, quantize_model, stored_bytes
from shardwise.model.quantized.rounding import round_matrix
from shardwise.plan.serving.plan import plan_serving
from shardwise.plan.serving.pool import weight_bytes
from shardwise.run import UserError, read_run
from shardwise.run.sections.serve import ServeConfig
from shardwise.run.weights import QUANTIZED, SMOOTHED
from shardwise.serve.engine import Engine, make_engine
from shardwise.serve.request import Request, Sampling
from shardwise.serve.runner import Runner

SETTINGS = ServeConfig(page_tokens=4, max_sequences=4, max_step_tokens=7)
PROMPTS = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (7,), (30, 31, 32, 33, 34)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", [*QUANTIZED, "smoothed"])
@pytest.mark.drawn(7, "family", "weights")
def test_the_engine_equals_the_forward_pass(family: str, weights: str) -> None:
    model = copy.deepcopy(model_of(family))
    quantize_model(model, SMOOTHED if weights == "smoothed" else weights)
    runner = Runner(model, 40, 4, 4, LONGEST, torch.float64)
    engine = Engine(runner, SETTINGS, 40)
    found = answers(engine, [Request(str(n), p, 6, Sampling(0.0, logprobs=0)) for n, p in enumerate(PROMPTS)])
    for n, prompt in enumerate(PROMPTS):
        text, logprobs = list(prompt), []
        with torch.inference_mode():
            for _ in range(6):
                row = model(torch.tensor([text])).result[0, -1].log_softmax(-1)
                text.append(int(row.argmax()))
                logprobs.append(float(row.max()))
        outputs = found[str(n), 0]
        assert tokens_of(outputs) == text[len(prompt) :]
        assert [p.logprob for output in outputs for p in output.logprobs] == pytest.approx(logprobs, abs=1e-9)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a tiny model with experts."""
    from shardwise.checkpoint.writer import FILE_BYTES, Entry, write_weights
    from shardwise.run import to_dict
    from shardwise.run.write import sections_to_toml

    model = model_of("mixtral", torch.float32)
    state = model.state_dict()
    entries = [Entry(name, t.dtype, tuple(t.shape), lambda t=t: iter((t,))) for name, t in state.items()]
    write_weights(tmp_path, entries, FILE_BYTES, lambda _: None)
    run = read_run(None, ["train.seq_len=64"])
    run = replace(run, name="tiny", model=model.config, train=replace(run.train, dtype="float32"))
    model_keys = to_dict(run)["model"]
    text = sections_to_toml({"name": "tiny", "model": model_keys, "train": {"dtype": "float32", "seq_len": 64}})
    (tmp_path / "run.toml").write_text(text)
    return tmp_path


@pytest.mark.parametrize("weights", [*QUANTIZED, "bfloat16"])
@pytest.mark.drawn(2)
def test_a_checkpoint_is_rounded_as_it_is_read(checkpoint: Path, weights: str) -> None:
    run = read_run(checkpoint / "run.toml", [f"serve.weights={weights}", "serve.max_sequences=4"])
    engine = make_engine(checkpoint, run)
    model = engine.runner.model
    plain, _ = load_model(checkpoint, torch.float32)
    assert stored_bytes(model) == weight_bytes(run)
    for (_, made), (_, weight) in zip(layer_matrices(model), layer_matrices(plain), strict=True):
        if weights == "bfloat16":
            assert torch.equal(made, weight.bfloat16())
            continue
        assert isinstance(made, QuantizedMatrix)
        wanted = round_matrix(weight.detach(), QUANTIZED[weights])
        assert wanted is not None
        assert torch.equal(made.dequantized(), wanted.dequantized())
    assert tokens_of(answers(engine, [Request("a", (1, 2, 3), 4, Sampling(0.0))])["a", 0])


@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_a_head_in_8_bits_is_rounded_by_row_and_counted(checkpoint: Path, weights: str) -> None:
    run = read_run(checkpoint / "run.toml", [f"serve.weights={weights}", "serve.head=int8", "serve.max_sequences=4"])
    engine = make_engine(checkpoint, run)
    model = engine.runner.model
    assert isinstance(model.head.weight, QuantizedMatrix)
    assert stored_bytes(model) == weight_bytes(run) < weight_bytes(replace(run, serve=replace(run.serve, head="auto")))
    plain, _ = load_model(checkpoint, torch.float32)
    wanted = round_matrix(plain.head.weight.detach(), QUANTIZED["int8"])
    assert torch.equal(model.head.weight.dequantized(), wanted.dequantized())
    found = tokens_of(answers(engine, [Request("a", (1, 2, 3), 6, Sampling(0.0))])["a", 0])
    text = [1, 2, 3]
    with torch.inference_mode():
        for _ in range(6):
            text.append(int(model(torch.tensor([text])).result[0, -1].argmax()))
    assert found == text[3:]


def test_a_head_that_is_the_embedding_stays(checkpoint: Path) -> None:
    run = read_run(checkpoint / "run.toml", ["serve.head=int8", "model.tied_embeddings=true"])
    with pytest.raises(UserError, match=r"serve\.head.*the embedding as well"):
        make_engine(checkpoint, run)
    with pytest.raises(UserError, match=r"serve\.head.*the embedding as well"):
        plan_serving(replace(run, serve=replace(run.serve, rate=1.0)))


def test_what_is_kept_as_it_is_takes_what_the_plan_says() -> None:
    assert keep_weights(copy.deepcopy(model_of("llama")), "auto") == 0


def test_an_unknown_kind_is_a_mistake(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"serve\.weights"):
        read_run(checkpoint / "run.toml", ["serve.weights=int3"])
