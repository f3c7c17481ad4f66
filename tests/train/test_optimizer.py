"""Muon's orthogonalisation, who decays and who does not, and the course of the learning rate."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from interpreted_kernels import Interpreter

from shardwise.run import TrainConfig, run_from_dict
from shardwise.train.optimizers.onebit_adam import OneBitAdamW
from shardwise.train.optimizers.optimizer import orthogonalize
from shardwise.train.optimizers.schedule import learning_rate_factor
from shardwise.train.step import TrainState


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (3, 8, 16)])
def test_orthogonalising_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = orthogonalize(g)
    values = torch.linalg.svdvals(out)
    assert values.min() > 0.3
    assert values.max() < 1.3
    # The directions stay: the nearest orthogonal matrix is U V^T.
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    cosine = (out * (u @ vh)).sum() / out.norm() / (u @ vh).norm()
    assert cosine > 0.95
    if g.ndim == 3:
        torch.testing.assert_close(out[1], orthogonalize(g[1]))


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (3, 8, 16)])
def test_the_iteration_is_the_quintic(shape: tuple[int, ...]) -> None:
    """On singular values it is f(v) = a v + b v^3 + c v^5, five times."""
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, values, vh = torch.linalg.svd(g, full_matrices=False)
    values = values / (g.norm(dim=(-2, -1)).unsqueeze(-1) + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(orthogonalize(g), u * values.unsqueeze(-2) @ vh, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_decay_spares_norms_and_biases(optimizer: str) -> None:
    run = run_from_dict(
        dict(
            model=dict(
                layers=1, hidden=16, heads=2, vocab=11, norm="layernorm", bias="all", activation="gelu", position="learned"
            ),
            train=dict(seq_len=8, optimizer=optimizer, weight_decay=0.5, lr=0.1, muon_lr=0.1),
        )
    )  # fmt: skip
    train_state = TrainState(run)
    before = {n: p.detach().clone() for n, p in train_state.model.named_parameters()}
    for p in train_state.model.parameters():
        p.grad = torch.zeros_like(p)
    train_state.optimizer.step(run.train.steps // 100, torch.ones(()))
    for name, p in train_state.model.named_parameters():
        shrunk = not torch.equal(p, before[name])
        assert shrunk == (p.ndim > 1), name


def test_muon_takes_the_matrices_of_blocks_and_leaves_the_rest() -> None:
    run = run_from_dict(
        dict(
            model=dict(layers=1, hidden=16, heads=2, experts=2, experts_per_token=1),
            train=dict(optimizer="muon"),
        )
    )
    optimizer = TrainState(run).optimizer
    names = {p: h.name for p, h in zip(optimizer.shards, optimizer.parameters, strict=True)}
    adam, muon = ({names[p] for g in part.param_groups for p in g["params"]} for part in optimizer.parts)
    assert {"embed.weight", "head.weight", "norm.weight"} <= adam
    assert "layers.0.attention.q.weight" in muon
    assert "layers.0.ffn.experts.up" in muon
    assert adam | muon == set(names.values())


def test_learning_rate_follows_each_schedule() -> None:
    def course(**keys: object) -> list[float]:
        train = TrainConfig(steps=10, warmup=2, final_lr=0.1, **keys)  # type: ignore[arg-type]
        return [learning_rate_factor(train, s) for s in range(1, 11)]

    for schedule in ("cosine", "linear", "wsd", "constant"):
        values = course(schedule=schedule)
        assert values[:2] == [0.5, 1.0]
        assert values[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
        assert all(a >= b for a, b in pairwise(values[1:]))
    assert course(schedule="cosine")[5] == pytest.approx(0.55)
    assert course(schedule="linear")[5] == pytest.approx(0.55)
    assert course(schedule="wsd", decay=0.4)[:6] == [0.5, 1, 1, 1, 1, 1]
    assert course(schedule="wsd", decay=0.4)[7] == pytest.approx(0.55)


@pytest.mark.drawn(group="kernels")
def test_the_kernel_of_adamw_does_what_pytorchs_does(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("adamw_kernels.py"))


def test_onebit_adam_moves_no_element_further_than_adam_can() -> None:
    """A second moment near 0 at the end of the warm-up, as of a rare token: later rounding is divided by it."""
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    defaults = dict(lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    optimizer = OneBitAdamW([dict(params=[weight], weight_decay=0.0)], defaults, warmup=2)
    for gradient in ([1.0, 1e-12, 0.0], [1.0, 1e-12, 0.0], [1.0, 0.3, 0.3]):
        before = weight.detach().clone()
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    moved = (weight - before).detach().abs()
    assert moved[0] == pytest.approx(0.1)
    assert moved[1] == pytest.approx(0.1)  # as far as Adam moves an element whose gradients are all alike
    assert moved[2] == 0  # it never had a gradient: what comes is rounding
