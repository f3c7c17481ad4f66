"""Adapters of stacked experts are, expert by expert, those of a matrix, which `tests/checkpoint/test_peft.py` holds to peft."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.adapters import LowRank, LowRankExperts, row_lengths
from shardwise.model.layers import Linear
from shardwise.model.moe.layer import Experts, RowsOfExperts, ScaledRows, experts_of
from shardwise.run import AdapterConfig, ModelConfig

COUNTS = torch.tensor([3, 0, 5])
CONFIG = ModelConfig(hidden=16, expert_ffn=12, experts=3, experts_per_token=1)


def stacked(adapter: AdapterConfig) -> Experts:
    """Experts with adapters of random values, in float64."""
    torch.manual_seed(0)
    experts = Experts(CONFIG).double()
    experts.lora = LowRankExperts(experts, ["gate", "up", "down"], adapter).double()
    for name, parameter in experts.named_parameters():
        nn.init.normal_(parameter, std=0.3)
        if name.endswith("_magnitude"):
            parameter.data.abs_().add_(1)
    return experts


def alone(experts: Experts, part: str, expert: int, adapter: AdapterConfig) -> Linear:
    """One matrix of one expert as a layer."""
    weight = getattr(experts, part)[expert].detach()
    layer = Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
    layer.lora = LowRank(weight.shape[1], weight.shape[0], adapter).double()
    values = {"weight": weight} | {
        f"lora.{name}": getattr(experts.lora, f"{part}_{letter}")[expert].detach()
        for name, letter in (("A.weight", "A"), ("B.weight", "B"), ("magnitude", "magnitude"))
        if hasattr(experts.lora, f"{part}_{letter}")
    }
    layer.load_state_dict(values)
    return layer


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_each_expert_has_the_adapter_of_a_matrix(kind: str) -> None:
    adapter = AdapterConfig(kind, rank=4, alpha=6.0)
    experts = stacked(adapter)
    x = torch.randn(int(COUNTS.sum()), 16, dtype=torch.float64)
    out = experts(x, COUNTS)
    out.square().sum().backward()
    start = 0
    for expert, count in enumerate(COUNTS.tolist()):
        layers = {part: alone(experts, part, expert, adapter) for part in ("gate", "up", "down")}
        rows = x[start : start + count]
        want = layers["down"](nn.functional.silu(layers["gate"](rows)) * layers["up"](rows))
        assert torch.allclose(out[start : start + count], want, rtol=1e-12, atol=1e-12)
        if count:
            want.square().sum().backward()
        for part, layer in layers.items():
            for name, parameter in layer.lora.named_parameters():
                got = getattr(experts.lora, f"{part}_{name.removesuffix('.weight')}").grad[expert]
                assert torch.allclose(got, parameter.grad if count else torch.zeros_like(got), rtol=1e-9, atol=1e-12)
        start += count


def test_magnitudes_begin_as_the_lengths_of_rows() -> None:
    experts = stacked(AdapterConfig("dora", rank=4))
    for part in ("gate", "up", "down"):
        getattr(experts.lora, f"{part}_B").data.zero_()
        getattr(experts.lora, f"{part}_magnitude").data.copy_(row_lengths(getattr(experts, part)))
    x = torch.randn(8, 16, dtype=torch.float64)
    with_adapters = experts(x, COUNTS)
    experts.lora = None
    assert torch.allclose(with_adapters, experts(x, COUNTS), rtol=1e-12)


def test_rows_beyond_those_counted_give_no_gradient() -> None:
    x, factors = torch.randn(10, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    ScaledRows.apply(x, factors, COUNTS).sum().backward()
    want = torch.stack([part.sum(0) for part in x[:8].split(COUNTS.tolist())])
    assert torch.allclose(factors.grad, want)
    assert experts_of(COUNTS, 10).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 2, 2]


def test_dropout_goes_by_token_and_expert() -> None:
    lora = stacked(AdapterConfig("lora", rank=4, dropout=0.25)).lora
    keys = torch.arange(8) * 7919

    def dropped(order: Tensor, counts: Tensor, first: int = 0) -> Tensor:
        lora.first_expert = first
        return lora.dropped("up", torch.ones(len(order), 4000, dtype=torch.float64), RowsOfExperts(counts, keys[order]))

    whole = dropped(torch.arange(8), COUNTS)
    assert abs((whole == 0).double().mean() - 0.25) < 0.01
    assert torch.allclose(whole[whole != 0], torch.tensor(4 / 3, dtype=torch.float64))
    # Another rank has the last two experts alone: the same tokens lose the same there.
    assert torch.equal(dropped(torch.arange(3, 8), COUNTS[1:], first=1), whole[3:])
    # The same token loses something else at another expert.
    assert not torch.equal(dropped(torch.arange(3), torch.tensor([0, 3, 0]))[0], whole[0])
