"""Invariant operations: what they compute is the ordinary thing, with its gradients; a row's bits do not depend on the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import FAMILIES, LONGEST, VOCAB, model_of
from interpreted_kernels import Interpreter

from shardwise.measure.verify import random_batch
from shardwise.model import Transformer, initialize
from shardwise.model.fused import fuse
from shardwise.model.gemm.decoding import DecodingGemms
from shardwise.model.invariant import network
from shardwise.model.invariant.network import by_row, linear, make_invariant, token_logprobs
from shardwise.model.varlen import cu_seqlens_of
from shardwise.run import ModelConfig, UserError, read_run, run_from_dict
from shardwise.run.derive import derive_model
from shardwise.train.step import TrainState


@pytest.mark.drawn(group="kernels")
def test_the_kernels(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("invariant_kernels.py"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(40, 33), (257, 512)])
def test_rows_do_not_depend_on_their_company_or_place(n: int, k: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(n, k, generator=draw).to(dtype), torch.randn(n, generator=draw).to(dtype)
    x = torch.randn(50, k, generator=draw).to(dtype)
    whole, function = linear(x, weight, bias), by_row(F.silu, x[None])[0]
    torch.testing.assert_close(whole, F.linear(x, weight, bias))
    for first, last in ((0, 1), (7, 8), (7, 31), (49, 50), (1, 50)):
        assert torch.equal(linear(x[first:last], weight, bias), whole[first:last])
        assert torch.equal(by_row(F.silu, x[None, first:last])[0], function[first:last])


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_the_ordinary_network(family: str) -> None:
    """In float64, for packed documents."""
    config = derive_model(ModelConfig(layers=2, hidden=32, heads=4, vocab=VOCAB, **FAMILIES[family]), LONGEST)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (2, 24), generator=draw)
    documents = np.repeat(np.array([[0] * 5 + [1] * 19, [0] * 20 + [1] * 4], np.int32), 1, axis=0)
    positions = torch.cat([torch.arange(n) for n in (5, 19, 20, 4)]).view(2, 24)
    found = []
    for invariant in (False, True):
        with torch.inference_mode(False):
            model = Transformer(config, dtype=torch.float64).double()
            initialize(model, config, 0)
        given = torch.from_numpy(cu_seqlens_of(documents) if invariant else documents)
        if invariant:
            make_invariant(model)
        targets = tokens.roll(-1, 1).masked_fill(tokens == 3, -100)
        out = model(tokens, positions, given, finish=lambda x, w, m=model, t=targets: m.loss(x, w, t))
        out.result.backward()
        found.append([out.result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for plain, own in zip(*found, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-9, atol=1e-9)


def test_a_run_trains_with_it_and_evaluates_to_the_bits_that_its_model_gives() -> None:
    model = dict(layers=2, hidden=32, heads=4, kv_heads=2, ffn=96, vocab=61)
    train = dict(steps=9, seq_len=16, global_batch=4, microbatch=2, device="cpu", lr=1e-2)
    losses = {}
    for invariant in (False, True):
        run = run_from_dict(dict(model=model, train=train | dict(invariant=invariant)))
        state = TrainState(run)
        batch = random_batch(run)
        losses[invariant] = [state.train_step(batch).read()[0] for _ in range(4)]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert losses[True][-1] < losses[True][0]
    trained = state.model
    assert isinstance(trained, Transformer)
    assert trained.invariant
    with torch.no_grad():
        tokens, targets = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.targets).long()
        whole = trained(tokens).result.flatten(0, 1)
        alone = torch.cat([trained(row[None]).result[0] for row in tokens])
        assert torch.equal(whole, alone)
        mean = -token_logprobs(whole, targets.flatten()).double().mean()
    assert state.evaluate(lambda numbers: batch, np.arange(4)) == pytest.approx(float(mean), rel=1e-6)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that passes for one of a GPU."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_multiplies_routers_in_parts_of_one_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which its kernel asks for, and whose sum is as exact as float32."""

    def multiplied(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert x.dtype == weight.dtype
        return F.linear(x.to(dtype), weight.to(dtype))

    monkeypatch.setattr(network, "linear", multiplied)
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 64, generator=draw).to(dtype), torch.randn(8, 64, generator=draw)
    with torch.no_grad():
        found = network.invariant_router_logits(x.as_subclass(OnGpu), weight).as_subclass(torch.Tensor)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_fusing_its_blocks_leaves_its_last_norm() -> None:
    config = derive_model(ModelConfig(layers=1, hidden=64, heads=2, head_dim=32, vocab=VOCAB), LONGEST)
    model = Transformer(config).eval().requires_grad_(False)
    make_invariant(model)
    assert fuse(model, LONGEST, DecodingGemms()) == 1
    assert "forward" not in vars(model.norm)


def test_without_it_the_bits_do_depend_on_the_company() -> None:
    """Or the tests of invariance would prove nothing."""
    tokens = torch.randint(VOCAB, (8, 33), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model = model_of("llama", torch.float32)
        whole = model(tokens).result
        assert not all(
            torch.equal(model(row[None, :n]).result[0], whole[b, :n]) for b, row in enumerate(tokens) for n in (1, 33)
        )


@pytest.mark.parametrize(
    ("overrides", "phrase"),
    [
        (["layout.tensor=2"], "layout.tensor = 2"),
        (["layout.context=2"], "layout.context = 2"),
        (["train.fp8=rowwise", "train.dtype=bfloat16"], "fp8"),
        (["train.compile=true"], "compiled"),
        (["train.loss=chunked"], "the chunked loss"),
    ],
)
def test_what_it_does_not_go_with_is_refused(overrides: list[str], phrase: str) -> None:
    with pytest.raises(UserError, match=phrase):
        read_run(None, ["train.invariant=true", *overrides])
