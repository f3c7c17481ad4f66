"""Packed matrices: what is packed comes out again, rounding is to the nearest, the network computes with what the packed weights
stand for, and the kernels do as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted_kernels import Interpreter

from shardwise.model import Transformer, initialize
from shardwise.model.quantized.linear import QuantizedGemm, rounded_rows
from shardwise.model.quantized.matrix import QuantizedMatrix, pack_int4, unpack_int4
from shardwise.model.quantized.model import layer_matrices, put_matrix, quantize_model, stored_bytes
from shardwise.model.quantized.rounding import integers_of, round_matrix
from shardwise.run import ModelConfig
from shardwise.run.derive import derive_model
from shardwise.run.parameters import first_parameters, last_parameters, layer_parameters
from shardwise.run.weights import QUANTIZED, SMOOTHED, WeightFormat, is_reduced, parameter_bytes

FORMS = {**QUANTIZED, "symmetric": WeightFormat("int4", 32), "smoothed": SMOOTHED}


@pytest.mark.parametrize("what", ["skinny", "tiles", "dequantize", "many rows", "fp8"])
@pytest.mark.drawn(group="kernels")
def test_the_kernels(what: str, interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("quantized_kernels.py"), what)


def test_four_bits_are_packed_by_eighths_of_a_group() -> None:
    values = torch.randint(0, 16, (3, 5, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = pack_int4(values, 32)
    assert words.shape == (3, 5, 8)
    assert torch.equal(unpack_int4(words, 32), values)
    word = int(words[1, 2, 5]) & 0xFFFFFFFF  # the second word of the second group
    assert [(word >> 4 * n) & 15 for n in range(8)] == values[1, 2, 32 + 1 : 64 : 4].tolist()


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_rounded_to_the_nearest(name: str) -> None:
    """No other integer, and no other number of fp8, is nearer than the one taken."""
    form, draw = FORMS[name], torch.Generator().manual_seed(0)
    weight = torch.randn(6, 64, dtype=torch.float64, generator=draw) + 0.3
    made = round_matrix(weight, form)
    assert made is not None
    values, scale = made.dequantized(), made.scale.double()
    error = (values - weight).abs().unflatten(1, (made.scale.shape[1], -1))
    if form.kind == "fp8":
        everything = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        everything = everything[~everything.isnan()] * scale[..., None]
        best = (weight[..., None] - everything).abs().amin(-1)
        assert (error.flatten(1) <= best + 1e-9).all()
    else:
        # An asymmetric zero point is an integer too, which may cost the ends of the range half a step.
        clipped = 0.5 if form.zeros or name == "symmetric" else 0.0
        assert (error <= scale[..., None] * (0.5 + clipped) * (1 + 2**-7)).all()
        assert float((error <= scale[..., None] * 0.5).double().mean()) > 0.9


def test_a_group_without_weights_stays_zero() -> None:
    for form in FORMS.values():
        made = round_matrix(torch.zeros(2, 32), form)
        assert made is not None
        assert torch.equal(made.dequantized(), torch.zeros(2, 32))


def test_rows_that_four_bits_cannot_hold_stay_as_they_are() -> None:
    form = QUANTIZED["int4"]
    assert [form.group_of(n) for n in (4096, 14336, 192, 96, 48, 40, 20)] == [128, 128, 64, 32, 16, 8, 0]
    assert round_matrix(torch.randn(4, 20), form) is None
    assert form.bytes(4, 20) == 0


@pytest.mark.parametrize("name", FORMS)
def test_a_packed_matrix_is_a_tensor_to_the_network(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(16, 32, generator=draw), torch.randn(2, 3, 32, generator=draw)
    made = round_matrix(weight, FORMS[name])
    assert made is not None
    plain = made.dequantized()
    assert torch.equal(made + 1, plain + 1)
    assert torch.equal(made.to(torch.float64), made.dequantized(torch.float64))
    wanted = rounded_rows(x, FORMS[name].activations) @ plain.T
    bias = torch.randn(16, generator=draw)
    torch.testing.assert_close(QuantizedGemm()(x, made, bias), wanted + bias)
    both = QuantizedMatrix.joined([made, made])
    assert torch.equal(both.dequantized(), torch.cat((plain, plain)))
    assert torch.equal(both.map_rows(lambda part: part[16:]).dequantized(), plain)
    moved = torch.randperm(32, generator=draw)
    turned = QuantizedMatrix(made.packed, made.scale, made.zero, made.form, made.dtype, moved)
    assert torch.equal(turned.dequantized()[:, moved], plain)


def test_the_nearest_integers_of_scales_that_are_given() -> None:
    scale, zero = torch.tensor([[0.5]]), torch.tensor([[3]], dtype=torch.uint8)
    weight = torch.tensor([[-9.0, -1.5, -0.3, 0.0, 0.3, 2.0, 99.0]])
    assert integers_of(weight, scale, zero, QUANTIZED["int4"]).tolist() == [[0, 0, 2, 3, 4, 7, 15]]
    assert integers_of(weight, scale, None, QUANTIZED["int8"]).tolist() == [[-18, -3, -1, 0, 1, 4, 127]]


@pytest.mark.parametrize("weights", [*QUANTIZED, "bfloat16"])
def test_the_plan_counts_the_bytes_that_a_model_holds(weights: str) -> None:
    config = derive_model(
        ModelConfig(layers=2, hidden=32, heads=4, vocab=40, experts=4, experts_per_token=2, dense_layers=1, bias="qkv"),
        16,
    )
    model = Transformer(config)
    initialize(model, config, 0)
    quantize_model(model, weights)
    tables = [layer_parameters(config, config.is_moe(n)) for n in range(2)]
    entries = [*first_parameters(config), *last_parameters(config), *(entry for table in tables for entry in table)]
    assert stored_bytes(model) == sum(parameter_bytes(entry, weights, "float32") for entry in entries)
    packed = {id(matrix) for _, matrix in layer_matrices(model) if isinstance(matrix, QuantizedMatrix)}
    assert len(packed) == (sum(map(is_reduced, entries)) if weights in QUANTIZED else 0)


def test_matrices_that_are_packed_already_are_left_alone() -> None:
    config = derive_model(ModelConfig(layers=1, hidden=32, heads=4, vocab=40), 16)
    model = Transformer(config)
    initialize(model, config, 0)
    name, matrix = next(layer_matrices(model))
    made = round_matrix(matrix.detach(), QUANTIZED["int8"])
    assert made is not None
    put_matrix(model, name, made)
    quantize_model(model, "int4")
    kinds = {matrix.form.kind for _, matrix in layer_matrices(model) if isinstance(matrix, QuantizedMatrix)}
    assert kinds == {"int8", "int4"}


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_a_feed_forward_layer_is_its_two_gemms(name: str) -> None:
    torch.manual_seed(0)
    gate_up, down = (round_matrix(torch.randn(n, k) * 0.1, QUANTIZED[name]) for n, k in ((512, 128), (128, 256)))
    assert gate_up is not None
    assert down is not None
    x, norm, gemm = torch.randn(3, 128), (torch.rand(128), 1e-5), QuantizedGemm()
    gate, up = gemm.fused(x, gate_up, norm).chunk(2, dim=-1)
    wanted = x + gemm.fused(torch.nn.functional.silu(gate) * up, down)
    torch.testing.assert_close(gemm.feed_forward(x, gate_up, down, norm, x, "silu"), wanted)
