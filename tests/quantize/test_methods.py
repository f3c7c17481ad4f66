"""GPTQ, AWQ and SmoothQuant on small problems whose answers are known, and on every family of models."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from engines import FAMILIES, VOCAB, model_of

from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.model import layer_matrices
from shardwise.model.quantized.rounding import round_matrix
from shardwise.model.transformer import Block
from shardwise.quantize.awq import clipped, output_error, search_scales
from shardwise.quantize.gptq import gptq
from shardwise.quantize.inputs import inputs_of, recorded
from shardwise.quantize.layers import Settings, quantize_layers
from shardwise.quantize.sites import fold, free_scales, sites_of
from shardwise.run import UserError
from shardwise.run.weights import QUANTIZED, SMOOTHED, WeightFormat

INT4 = WeightFormat("int4", 16, zeros=True)


def drawn_inputs(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Inputs whose channels go together."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, width // 4, dtype=torch.float64, generator=draw)
    spread = torch.randn(width // 4, width, dtype=torch.float64, generator=draw)
    return mixed @ spread + 0.1 * torch.randn(rows, width, dtype=torch.float64, generator=draw)


def error_of(made: QuantizedMatrix | None, weight: torch.Tensor, x: torch.Tensor) -> float:
    assert made is not None
    return float(((made.dequantized(torch.float64) - weight) @ x.T).square().sum())


def test_gptq_makes_up_for_each_column_as_least_squares_does() -> None:
    """After each column the others are those that change the output least, found by solving for them."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 8, dtype=torch.float64, generator=draw)
    x = drawn_inputs(40, 8)
    products = x.T @ x
    made = gptq(weight, products, QUANTIZED["int8"], torch.float64, damping=0.0)
    assert made is not None
    scale = weight.abs().amax(1, keepdim=True).div(127).float().double()
    left, integers = weight.clone(), torch.empty_like(weight)
    for n in range(8):
        integers[:, n] = (left[:, n] / scale[:, 0]).round().clamp(-127, 127)
        change = integers[:, n] * scale[:, 0] - left[:, n]
        if n < 7:
            rest = x[:, n + 1 :]
            left[:, n + 1 :] += torch.linalg.lstsq(rest, -x[:, n : n + 1] * change).solution.T
    assert torch.equal(made.packed.double(), integers)
    assert torch.equal(made.scale.double(), scale)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", [INT4, WeightFormat("int4", 128), QUANTIZED["int8"], QUANTIZED["fp8"]])
def test_gptq_is_nearer_than_rounding(form: WeightFormat, act_order: bool) -> None:
    weight = torch.randn(24, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = drawn_inputs(600, 256)
    made = gptq(weight, x.T @ x, form, torch.float64, act_order=act_order)
    nearest = error_of(round_matrix(weight, form), weight, x)
    assert error_of(made, weight, x) < (0.5 if form.kind == "int4" else 0.8) * nearest


def test_gptq_of_inputs_that_never_came_is_rounding() -> None:
    weight = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made, nearest = gptq(weight, torch.zeros(32, 32).double(), INT4, torch.float64), round_matrix(weight, INT4)
    assert made is not None
    assert nearest is not None
    assert torch.equal(made.dequantized(), nearest.dequantized())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", [INT4, WeightFormat("int4", 128), QUANTIZED["int8"], QUANTIZED["fp8"]])
def test_gptq_removes_columns_whose_inputs_were_always_zero(form: WeightFormat, act_order: bool) -> None:
    """As the authors' code does. The others are rounded as if these had never been there, to scales of their own."""
    weight = torch.randn(24, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x, dead = drawn_inputs(600, 256), torch.arange(5, 256, 7)
    x[:, dead] = 0
    weight[:, dead] *= 100
    made = gptq(weight, x.T @ x, form, torch.float64, act_order=act_order)
    assert made is not None
    assert not made.dequantized()[:, dead].any()
    weight[:, dead] = 0
    without = gptq(weight, x.T @ x, form, torch.float64, act_order=act_order)
    assert without is not None
    assert torch.equal(made.dequantized(), without.dequantized())
    assert error_of(made, weight, x) < error_of(round_matrix(weight, form), weight, x)


def test_gptq_without_damping_damps_what_cannot_be_inverted() -> None:
    weight = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = drawn_inputs(8, 32)  # fewer inputs than channels
    made = gptq(weight, x.T @ x, INT4, torch.float64, damping=0.0)
    assert error_of(made, weight, x) < error_of(round_matrix(weight, INT4), weight, x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gptq_of_inputs_that_are_no_numbers_is_refused(value: float) -> None:
    products = torch.eye(32, dtype=torch.float64)
    products[3, 3] = value
    with pytest.raises(UserError, match="not finite numbers"):
        gptq(torch.ones(4, 32, dtype=torch.float64), products, INT4, torch.float64)


def test_awq_scales_up_what_is_salient() -> None:
    """With few inputs a hundred times as large as the others."""
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(32, 64, dtype=torch.float64, generator=draw)
    x = torch.randn(200, 64, dtype=torch.float64, generator=draw)
    x[:, ::16] *= 100
    products = x.T @ x
    sizes = x.abs().mean(0)
    scale = search_scales([(weight, products)], sizes, INT4, torch.float64, shared=True)
    assert scale[::16].min() > 2 * scale[1::16].max()
    made = round_matrix(weight * scale, INT4)
    assert made is not None
    nearest = error_of(round_matrix(weight, INT4), weight, x)
    assert float(output_error(made.dequantized() / scale - weight, products)) < 0.5 * nearest


def test_awq_cuts_a_range_where_that_helps() -> None:
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(16, 64, dtype=torch.float64, generator=draw)
    weight[:, 5] *= 8
    x = torch.randn(200, 64, dtype=torch.float64, generator=draw)
    x[:, 5] *= 0.01  # a large weight of which little is seen
    made = clipped(weight, x.T @ x, INT4, torch.float64)
    assert error_of(made, weight, x) < 0.9 * error_of(round_matrix(weight, INT4), weight, x)


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_that_are_folded_change_nothing(family: str) -> None:
    model = copy.deepcopy(model_of(family))
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens).result
        for seed, block in enumerate(model.layers.values()):
            assert isinstance(block, Block)
            with recorded(block, sites_of(block), torch.device("cpu")) as found:
                model(tokens)
            for n, site in enumerate(sites_of(block)):
                if site.before:
                    draw = torch.Generator().manual_seed(100 * seed + n)
                    sizes = (
                        inputs_of(found, site, site.matrices[0]).sizes
                        if not site.follows_norm
                        else found[site.source].sizes
                    )
                    wanted = torch.rand(sizes.shape, generator=draw).double() + 0.5
                    fold(block, site, free_scales(block, site, wanted))
        torch.testing.assert_close(model(tokens).result, before, rtol=1e-9, atol=1e-9)
    packable = {name.split(".", 2)[2] for name, _ in layer_matrices(model)}
    named = {name for block in model.layers.values() for site in sites_of(block) for name in site.matrices}
    assert named == packable


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("method", "form"),
    [
        ("gptq", QUANTIZED["int8"]),
        ("awq", QUANTIZED["int8"]),
        ("smoothquant", SMOOTHED),
        ("gptq", QUANTIZED["int4"]),
        ("awq", QUANTIZED["int4"]),
    ],
)
@pytest.mark.drawn(8, "family", "method")
def test_every_family_is_packed_layer_by_layer(family: str, method: str, form: WeightFormat) -> None:
    """But for matrices of a width that 4 bits cannot hold."""
    model = copy.deepcopy(model_of(family, torch.float32))
    tokens = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens).result
        layers: list[int] = []
        quantize_layers(model, [(tokens, None, None)], Settings(form, method), lambda n, _: layers.append(n))  # type: ignore[arg-type]
        after = model(tokens).result
    assert layers == [1, 2]
    for _, matrix in layer_matrices(model):
        assert isinstance(matrix, QuantizedMatrix) or not form.group_of(matrix.shape[-1])
    assert not any("multiply" in vars(module) and module.training for module in model.modules())
    error = float((after - before).norm() / before.norm())
    assert error < (0.1 if form.kind == "int8" else 0.5)


def test_what_fp8_loses_is_less_by_gptq_and_less_with_whole_inputs() -> None:
    """In the outputs of a network for the tokens that it is calibrated on."""
    tokens = torch.randint(0, VOCAB, (8, 32), generator=torch.Generator().manual_seed(0))

    def lost(method: str, form: WeightFormat) -> float:
        model = copy.deepcopy(model_of("llama", torch.float32))
        with torch.no_grad():
            before = model(tokens).result
            quantize_layers(model, [(tokens, None, None)], Settings(form, method))  # type: ignore[arg-type]
            return float((model(tokens).result - before).norm() / before.norm())

    fp8 = QUANTIZED["fp8"]
    weights = replace(fp8, activations="")
    assert lost("gptq", fp8) < 0.95 * lost("round", fp8)
    assert lost("gptq", weights) < 0.8 * lost("round", weights)
    assert lost("round", weights) < 0.85 * lost("round", fp8)


def test_the_inputs_of_experts_are_the_tokens_they_get() -> None:
    model = copy.deepcopy(model_of("mixtral", torch.float32))
    block = model.layers["0"]
    assert isinstance(block, Block)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), recorded(block, sites_of(block), torch.device("cpu")) as found:
        model(tokens)
    assert found["ffn.experts.gate"].rows.sum() == found["ffn.experts.down"].rows.sum() == 2 * 9 * 2
    assert found["ffn_norm"].rows == found["attention_norm"].rows == 18
    whole = found["ffn.experts.gate"].products.sum(0)  # each token is at two experts
    torch.testing.assert_close(whole, 2 * found["ffn_norm"].products)
