"""Tensors that are recomputed in the backward pass: the same bits as saved ones, and the bytes and FLOPs of the plan."""

from __future__ import annotations

import sys
from itertools import product
from types import ModuleType
from typing import Any

import cases
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.measure.verify import TOLERANCE, verify_rank
from shardwise.model import Transformer, initialize
from shardwise.model.invariant.network import make_invariant
from shardwise.parallel.activations.quantized import quantized_in
from shardwise.parallel.activations.rematerialize import keep_in_form, rematerialize
from shardwise.parallel.activations.saving import saving
from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.rematerialization import SAVED, Choice, choices, fewest_seconds, graph
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.run import ModelConfig, Run
from shardwise.run.derive import derive_model
from shardwise.train.step import TrainState

PLAIN = "dense + no query norm"
OTHERS = [(PLAIN, "bfloat16"), ("dense", "float32"), ("mixture", "float32"), ("latent", "float32")]
LARGE = pytest.mark.large(
    "other models and 16 bits; the small tier has every tensor once, and layouts are drawn with it"
)
NOTHING = 1e-9
"""GiB that no layer keeps within."""


def run_of(model: str, budget: float, **train: Any) -> Run:
    layout = dict(recompute="optimal", recompute_budget=budget) if budget else {}
    return cases.make_run(model, layout, layers=2, **train)


def trained(run: Run) -> list[torch.Tensor]:
    """Losses of some steps, and the parameters behind them."""
    train_state = TrainState(run)
    losses = [train_state.train_step(cases.batch(step, True)).loss for step in range(2)]
    return [*losses, *(h.parameter.detach() for h in train_state.parallel.parameters)]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (PLAIN, "float32"),
        ("tied", "float64"),
        *(pytest.param(*each, marks=LARGE) for each in OTHERS),
    ],
)
def test_made_again_it_is_the_same_bits_and_the_bytes_of_the_plan(model: str, dtype: str) -> None:
    run = run_of(model, NOTHING, dtype=dtype)
    for one, other in zip(trained(run), trained(run_of(model, 0.0, dtype=dtype)), strict=True):
        assert torch.equal(one, other)
    verdict = verify_rank(run, steps=1)
    assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)
    plan, measured = (memory.ranks[0]["activations"] for memory in (verdict.planned.memory, verdict.measured.memory))
    assert plan == measured


def one_layer(invariant: bool = True, dtype: torch.dtype = torch.float32) -> Transformer:
    config = derive_model(ModelConfig(hidden=64, layers=1, heads=2, ffn=64, vocab=50), 32)
    model = Transformer(config, dtype)
    initialize(model, config, 0)
    if invariant:
        make_invariant(model)
    return model


def loss_and_gradients(model: Transformer) -> list[torch.Tensor]:
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    with saving():
        loss = model(tokens[:, :-1], finish=lambda x, w: model.loss(x, w, tokens[:, 1:])).result
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("words", [*((word,) for word in SAVED), SAVED], ids=lambda words: " ".join(words))
def test_an_invariant_layer_is_the_same_bits_too(words: tuple[str, ...]) -> None:
    plain, made = one_layer(), one_layer()
    rematerialize(made.layers["0"], words)
    for one, other in zip(loss_and_gradients(made), loss_and_gradients(plain), strict=True):
        assert torch.equal(one, other)


def test_the_product_of_an_invariant_layer_is_recomputed() -> None:
    """From gate and up, which it saves anyway."""
    model, noted = one_layer(), []
    rematerialize(model.layers["0"], {"inner"}, lambda out, inputs, make: noted.append((out, make(*inputs))))
    loss_and_gradients(model)
    ((out, again),) = noted
    assert torch.equal(out, again)


@pytest.mark.parametrize("word", ["", "function", "inner"])
def test_an_invariant_layer_asks_its_kernel_for_its_own_function(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recorded(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        asked.append(activation)
        return gate * up

    kernels = ModuleType("shardwise.model.kernels.gated")
    kernels.gated_product = recorded  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    block = one_layer(dtype=torch.bfloat16).layers["0"]
    keep_in_form(block, {word}, quantized_in(8))
    with FakeTensorMode(), torch.no_grad():
        gate = torch.empty(1, 4, 64, device="cuda", dtype=torch.bfloat16)
        block.ffn.gated(block.ffn.function, gate, gate)
    assert asked == ["silu"]


def test_a_layer_wrapped_twice_notes_the_words_of_both() -> None:
    """As one is whose tensors are recomputed in part and swapped in part."""
    model, first, second = one_layer(invariant=False), [], []
    rematerialize(model.layers["0"], {"inner"}, lambda out, inputs, make: first.append(out))
    rematerialize(model.layers["0"], {"function"}, lambda out, inputs, make: second.append((out, inputs)))
    loss_and_gradients(model)
    assert len(first) == 1
    ((out, (gate,)),) = second
    assert torch.equal(out, torch.nn.functional.silu(gate))


def test_a_budget_between_is_kept_with_some_of_them() -> None:
    whole = PlannedRank(run_of(PLAIN, 1e-3, dtype="float32"), 0).recomputed
    assert not any(whole.values())
    least = PlannedRank(run_of(PLAIN, NOTHING, dtype="float32"), 0).recomputed
    assert set(least[0]) == set(SAVED)
    between = run_of(PLAIN, 4e-4, dtype="float32")
    chosen = PlannedRank(between, 0).recomputed
    assert 0 < sum(map(len, chosen.values())) < sum(map(len, least.values()))
    assert not verify_rank(between, steps=1).beyond(TOLERANCE)


def test_no_other_assignment_is_faster() -> None:
    generator = np.random.default_rng(0)
    for _ in range(30):
        layers = tuple(
            (Choice(0.0, 0.0, frozenset()), *(Choice(*generator.integers(1, 40, 2).astype(float), frozenset({str(n)}))
             for n in range(4)))
            for _ in range(4)
        )  # fmt: skip
        spare = float(generator.integers(1, 140))
        found = fewest_seconds(layers, spare)
        every = [some for some in product(*layers) if sum(c.spared for c in some) >= spare]
        if every:
            assert sum(c.spared for c in found) >= spare
            assert sum(c.seconds for c in found) == min(sum(c.seconds for c in some) for some in every)
        else:
            assert sum(c.spared for c in found) == sum(max(c.spared for c in each) for each in layers)


def test_the_choices_of_a_layer_are_those_that_no_set_beats() -> None:
    tensors = graph(job_of(run_of(PLAIN, 0.0)), routed=False)
    assert set(tensors) == set(SAVED)
    best = choices(tensors)
    for word in SAVED:  # one more or one less of any set is a set too
        for choice in best:
            other = choice.dropped ^ {word}
            spared, seconds = (sum(getattr(tensors[w], name) for w in other) for name in ("size", "seconds"))
            assert any(c.spared >= spared * (1 - 1e-12) and c.seconds <= seconds * (1 + 1e-12) for c in best)
