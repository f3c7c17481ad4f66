"""A step against independent oracles: `transformers` with PyTorch's AdamW, a plain float64 loop, and itself in other pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.data.batches import IGNORE_INDEX, Batch
from shardwise.model import Transformer, initialize
from shardwise.run import Run, run_from_dict
from shardwise.train.step import TrainState

LENGTH = 24


def make_run(model: dict[str, Any] | None = None, **train: Any) -> Run:
    shape = dict(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=61, **(model or {}))
    base = dict(steps=20, seq_len=LENGTH, global_batch=8, dtype="float64", device="cpu", lr=1e-2, warmup=3)
    return run_from_dict(dict(model=shape, train=base | train))


def batches(count: int, holes: bool = False) -> list[Batch]:
    rng = np.random.default_rng(7)
    made = []
    for _ in range(count):
        tokens = rng.integers(0, 61, (8, LENGTH + 1))
        targets = tokens[:, 1:].copy()
        if holes:  # rows with different numbers of targets
            for row in range(8):
                targets[row, : row * 2] = IGNORE_INDEX
        made.append(Batch(tokens[:, :-1].copy(), targets))
    return made


def take(batch: Batch, rows: np.ndarray) -> Batch:
    return Batch(batch.tokens[rows], batch.targets[rows])


MIXTURE = dict(
    experts=4, experts_per_token=2, expert_ffn=32, shared_experts=1, dense_layers=1, router="sigmoid",
)  # fmt: skip


def train(run: Run, data: list[Batch]) -> tuple[list[float], list[float], TrainState]:
    train_state = TrainState(run)
    results = [train_state.train_step(batch) for batch in data]
    return [r.loss.item() for r in results], [r.grad_norm.item() for r in results], train_state


def test_twenty_steps_equal_transformers_with_adamw() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    run = make_run(dtype="float32", schedule="cosine", clip=0.7)
    train_state = TrainState(run)
    m = run.model
    config = LlamaConfig(
        hidden_size=m.hidden, num_hidden_layers=m.layers, num_attention_heads=m.heads, num_key_value_heads=m.kv_heads,
        intermediate_size=m.ffn, vocab_size=m.vocab, rms_norm_eps=m.norm_eps, max_position_embeddings=LENGTH,
        rope_parameters=dict(rope_type="default", rope_theta=m.rope_theta), tie_word_embeddings=False,
    )  # fmt: skip
    oracle = LlamaForCausalLM(config)
    ours = train_state.model
    pairs = {"model.embed_tokens": ours.embed, "model.norm": ours.norm, "lm_head": ours.head}
    for n, block in ours.layers.items():
        names = {
            "self_attn.q_proj": block.attention.q, "self_attn.k_proj": block.attention.k,
            "self_attn.v_proj": block.attention.v, "self_attn.o_proj": block.attention.out,
            "mlp.gate_proj": block.ffn.gate, "mlp.up_proj": block.ffn.up, "mlp.down_proj": block.ffn.down,
            "input_layernorm": block.attention_norm, "post_attention_layernorm": block.ffn_norm,
        }  # fmt: skip
        pairs |= {f"model.layers.{n}.{k}": v for k, v in names.items()}
    oracle.load_state_dict({f"{k}.weight": v.weight.detach().clone() for k, v in pairs.items()})
    decayed = [p for p in oracle.parameters() if p.ndim > 1]
    spared = [p for p in oracle.parameters() if p.ndim == 1]
    groups = [
        dict(params=decayed, weight_decay=run.train.weight_decay),
        dict(params=spared, weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=run.train.lr, betas=(0.9, 0.95), eps=1e-8)
    for step, batch in enumerate(batches(20), start=1):
        if step <= 3:
            factor = step / 3
        else:
            factor = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 3) / 17))
        for group in optimizer.param_groups:
            group["lr"] = run.train.lr * factor
        optimizer.zero_grad()
        logits = oracle(torch.from_numpy(batch.tokens)).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(oracle.parameters(), 0.7)
        optimizer.step()
        result = train_state.train_step(batch)
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-4)
        assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-3)


def test_twenty_float64_steps_equal_a_plain_loop_over_the_model() -> None:
    run = make_run(schedule="constant", warmup=0, weight_decay=0.2, clip=0.5)
    losses, norms, train_state = train(run, batches(20, holes=True))
    model = Transformer(run.model).double()
    initialize(model, run.model, run.train.seed)
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in model.named_parameters()}
    for step, batch in enumerate(batches(20, holes=True), start=1):
        logits = model(torch.from_numpy(batch.tokens)).result
        targets = torch.from_numpy(batch.targets)
        counted = targets != IGNORE_INDEX
        chosen = logits.log_softmax(-1)[counted].gather(-1, targets[counted][:, None])
        loss = -chosen.mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        assert losses[step - 1] == pytest.approx(loss.item(), rel=1e-12)
        assert norms[step - 1] == pytest.approx(norm.item(), rel=1e-11)
        with torch.no_grad():
            for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                g = g * min(1.0, 0.5 / (norm.item() + 1e-6))
                first, second = moments[name]
                first.mul_(0.9).add_(0.1 * g)
                second.mul_(0.95).add_(0.05 * g * g)
                if p.ndim > 1:
                    p.mul_(1 - 1e-2 * 0.2)
                p -= 1e-2 * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
    for ours, theirs in zip(train_state.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("model", [{}, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.drawn(1)
def test_accumulating_small_batches_equals_one_large_batch(model: dict[str, Any], optimizer: str) -> None:
    losses = {}
    for microbatch in (8, 4, 1):
        run = make_run(model, microbatch=microbatch, optimizer=optimizer, balance_loss=0.01, router_z_loss=0.001)
        losses[microbatch], _, _ = train(run, batches(6, holes=True))
    assert losses[4] == pytest.approx(losses[8], rel=1e-11)
    assert losses[1] == pytest.approx(losses[8], rel=1e-11)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_two_runs_are_identical_to_the_bit(dtype: str) -> None:
    first = train(make_run(MIXTURE, dtype=dtype), batches(4))
    second = train(make_run(MIXTURE, dtype=dtype), batches(4))
    assert first[:2] == second[:2]
    assert all(
        torch.equal(a, b) for a, b in zip(first[2].model.parameters(), second[2].model.parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.drawn(1)
def test_narrow_arithmetic_follows_float64(dtype: str) -> None:
    exact, _, _ = train(make_run(lr=1e-3), batches(1) * 15)
    narrow, _, _ = train(make_run(lr=1e-3, dtype=dtype), batches(1) * 15)
    assert exact[-1] < exact[0] - 0.05
    assert narrow == pytest.approx(exact, abs=1e-4 if dtype == "float32" else 0.02)


def test_an_overflowing_float16_step_is_skipped_and_the_scale_halved() -> None:
    run = make_run(dtype="float16", loss_scale=2.0**40)
    train_state = TrainState(run)
    before = [p.clone() for p in train_state.model.parameters()]
    result = train_state.train_step(batches(1)[0])
    assert not result.grad_norm.isfinite()
    assert train_state.loss_scale.scale == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, train_state.model.parameters(), strict=True))
    for batch in batches(30):
        train_state.train_step(batch)
    assert train_state.loss_scale.scale < 2.0**35
    assert not any(torch.equal(a, b) for a, b in zip(before, train_state.model.parameters(), strict=True))


@pytest.mark.drawn(group="whole runs")
def test_balancing_evens_the_load_of_experts() -> None:
    def spread(rate: float) -> float:
        run = make_run(MIXTURE | dict(dense_layers=0), balance_rate=rate, lr=1e-4, global_batch=8)
        train_state = TrainState(run)
        for router in train_state.routers:  # begin with a router that prefers some experts
            router.bias.copy_(torch.tensor([0.3, 0.1, 0.0, -0.3]))
        for _ in range(40):
            train_state.train_step(batches(1)[0])
        train_state.model(torch.from_numpy(batches(1)[0].tokens))
        return max((r.load.max() / r.load.mean()).item() for r in train_state.routers)

    assert spread(0.01) < 1.5
    assert spread(0.0) > 1.8


@pytest.mark.drawn(group="whole runs")
def test_the_balance_loss_pulls_the_router_towards_even_probabilities() -> None:
    def unevenness(weight: float) -> float:
        run = make_run(dict(experts=4, experts_per_token=1), balance_loss=weight, lr=1e-2, seed=3)
        train_state = TrainState(run)
        data = batches(1)[0]
        for _ in range(30):
            train_state.train_step(data)
        for router in train_state.routers:
            router.load.zero_()
        train_state.model(torch.from_numpy(data.tokens))
        return sum((r.load / r.load.mean() - 1).square().sum().item() for r in train_state.routers)

    assert unevenness(0.5) < 0.5 * unevenness(0.0)


def test_evaluation_is_the_mean_over_tokens_and_changes_nothing() -> None:
    train_state = TrainState(make_run(MIXTURE, microbatch=2))
    batch = batches(1, holes=True)[0]
    before = {k: v.clone() for k, v in train_state.model.state_dict().items()}
    value = train_state.evaluate(lambda rows: take(batch, rows), np.arange(8))
    assert value == pytest.approx(train_state.train_step(batch).loss.item(), rel=1e-12)
    fresh = TrainState(make_run(MIXTURE, microbatch=2))
    fresh.evaluate(lambda rows: take(batch, rows), np.arange(8))
    assert all(torch.equal(v, before[k]) for k, v in fresh.model.state_dict().items())
    assert not any(r.load.any() for r in fresh.routers)
