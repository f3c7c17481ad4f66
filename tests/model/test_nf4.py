"""Matrices in 4 bits: the published values, bitsandbytes' codes where it is installed, slices of a matrix, and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from shardwise.model.layers import Linear
from shardwise.model.quantized.nf4 import (
    NF4,
    NF4Gemm,
    Quantizer,
    dequantize_reference,
    nf4_values,
    quantize,
    quantize_to_nf4,
    tree_values,
)
from shardwise.parallel import shard
from shardwise.run import AdapterConfig, UserError
from shardwise.run.sections.adapter import NF4_BLOCK

CPU = torch.device("cpu")


def matrix(rows: int = 48, columns: int = 512, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def test_the_values_split_a_normal_distribution() -> None:
    """QLoRA, equation 4: quantiles of N(0, 1), 8 of one sign and 9 of the other, over the largest."""
    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    upper = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    lower = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat((lower, torch.zeros(1, dtype=torch.float64), upper)).sort().values
    assert (values / values.max() - torch.tensor(NF4, dtype=torch.float64)).abs().max() < 1e-6
    assert len(tree_values(CPU).unique()) == 256


@pytest.mark.parametrize("double", [True, False])
def test_a_weight_is_the_nearest_value_of_its_block(double: bool) -> None:
    whole = matrix()
    kept = quantize(whole, double)
    back = dequantize_reference(*kept, 0, whole.shape[1] // NF4_BLOCK, torch.float32)
    codes = torch.stack((kept.codes >> 4, kept.codes & 15), dim=-1).flatten(1)
    blocks = whole.view(-1, NF4_BLOCK)
    distance = (blocks / blocks.abs().amax(1, keepdim=True))[..., None] - nf4_values(CPU)
    assert torch.equal(distance.abs().argmin(-1).view_as(codes), codes.long())
    assert (back - whole).abs().mean() < 0.08 * whole.abs().mean() / 0.8
    assert kept.codes.nbytes + kept.absmax.nbytes + kept.scales.nbytes == pytest.approx(
        whole.numel() * (0.5 + (1 / 64 if double else 4 / 64) + (4 / 64 / 256 if double else 0)), rel=0.01
    )


@pytest.mark.parametrize("double", [True, False])
def test_a_slice_stands_for_the_same_numbers(double: bool) -> None:
    whole = matrix()
    codes, absmax, scales = quantize(whole, double)
    stride = whole.shape[1] // NF4_BLOCK
    want = dequantize_reference(codes, absmax, scales, 0, stride, torch.float32)
    for rows, blocks in ((slice(5, 31), slice(0, 8)), (slice(0, 48), slice(4, 8)), (slice(16, 20), slice(2, 3))):
        part = codes[:, blocks.start * 32 : blocks.stop * 32][rows], absmax[rows, blocks]
        got = dequantize_reference(*part, scales, rows.start * stride + blocks.start, stride, torch.float32)
        assert torch.equal(got, want[rows, blocks.start * 64 : blocks.stop * 64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    other = pytest.importorskip(
        "bitsandbytes.functional", reason="bitsandbytes is not installed; the published values are tested"
    )
    for shape in ((128, 256), (96, 4096), (512, 1024)):
        whole = matrix(*shape, dtype)
        single, state = other.quantize_4bit(whole, blocksize=64, compress_statistics=False, quant_type="nf4")
        ours = quantize(whole, double=False)
        assert torch.equal(single.flatten(), ours.codes.flatten())
        assert torch.equal(state.absmax.flatten(), ours.absmax.flatten())
        both, state = other.quantize_4bit(whole, blocksize=64, compress_statistics=True, quant_type="nf4")
        ours = quantize(whole)
        assert torch.equal(both.flatten(), ours.codes.flatten())
        assert torch.equal(state.state2.code, tree_values(CPU))
        assert torch.equal(torch.cat((state.state2.absmax, state.offset[None])), ours.scales)
        # It multiplies with a reciprocal where we divide: a scale that lies between two values may get either.
        assert (state.absmax.flatten() != ours.absmax.flatten()).float().mean() < 0.01


@pytest.mark.parametrize("double", [True, False])
def test_each_expert_of_a_stack_is_a_matrix_of_its_own(double: bool) -> None:
    stack = torch.stack([matrix(32, 128) * (n + 1) for n in range(3)])
    kept = quantize(stack, double)
    whole = dequantize_reference(*kept, 0, 2, torch.float32)
    for n, one in enumerate(stack):
        own = quantize(one, double)
        assert all(torch.equal(part[n], other) for part, other in zip(kept, own, strict=True))
        assert torch.equal(whole[n], dequantize_reference(*own, 0, 2, torch.float32))
    # Rows 8 to 24 and the second half of the columns.
    codes, absmax = kept.codes[:, 8:24, 32:], kept.absmax[:, 8:24, 1:]
    assert torch.equal(
        dequantize_reference(codes, absmax, kept.scales, 8 * 2 + 1, 2, torch.float32), whole[:, 8:24, 64:]
    )


def test_a_layer_multiplies_with_what_it_keeps() -> None:
    whole, layer = matrix(32, 128).double(), Linear(128, 32, dtype=torch.float64)
    bias = layer.bias
    quantize_to_nf4(layer, (0, 2), double=True)
    quantizer = Quantizer(lambda name: whole, double=True)
    for name in ("weight", "absmax", "absmax_scales"):
        layer.register_parameter(name, torch.nn.Parameter(quantizer.part(f"q.{name}"), requires_grad=False))
    assert isinstance(layer.gemm, NF4Gemm)
    back = dequantize_reference(*quantize(whole), 0, 2, torch.float64)
    x, other = (torch.ones(3, 128, dtype=torch.float64).cumsum(1).requires_grad_() for _ in range(2))
    (layer(x).square().sum()).backward()
    (torch.nn.functional.linear(other, back, bias).square().sum()).backward()
    assert torch.allclose(x.grad, other.grad, rtol=1e-12)
    assert AdapterConfig("qlora").double_quantization


def test_older_versions_of_pytorch_shard_no_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.register_parameter("codes", nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    shard._check_integers(module)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(UserError, match=r"need PyTorch 2\.13"):
        shard._check_integers(module)
    shard._check_integers(nn.Linear(1, 1))
