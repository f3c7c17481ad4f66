"""Packed matrices on a GPU: every kernel against the product with the matrix that the packed one stands for."""

from __future__ import annotations

import pytest
import torch

from shardwise.model.kernels.gemm.int4_rows import int4_rows, takes
from shardwise.model.kernels.gemm.skinny import skinny_gemm_reference
from shardwise.model.quantized.linear import QuantizedGemm
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import round_matrix
from shardwise.run.weights import QUANTIZED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")


def matrix_of(kind: str, n: int, k: int, zeros: bool = False) -> QuantizedMatrix:
    made = round_matrix(torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * 0.05, QUANTIZED[kind])
    if zeros:
        zero = torch.randint(0, 16, made.scale.shape, dtype=torch.uint8, device=DEVICE)
        made = QuantizedMatrix(made.packed, made.scale, zero, made.form, made.dtype)
    return made


def wanted(x: torch.Tensor, matrix: QuantizedMatrix, norm, residual, gated: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
    wide = None if norm is None else (norm[0].double(), norm[1])
    return skinny_gemm_reference(
        x.double(), matrix.dequantized(torch.float64), wide, None if residual is None else residual.double(), gated
    )


def error(made: torch.Tensor, want: torch.Tensor) -> float:
    return float((made.double() - want).norm() / want.norm())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (520, 512), (24, 128), (40, 1408), (16384, 2048)])
@pytest.mark.parametrize("around", ["", "norm", "residual", "silu", "norm gelu zeros"])
def test_rows_times_four_bits(rows: int, n: int, k: int, around: str) -> None:
    torch.manual_seed(0)
    gated = next((word for word in around.split() if word in ("silu", "gelu")), "")
    matrix = matrix_of("int4", n * 2 if gated else n, k, "zeros" in around)
    x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
    norm = (torch.rand(k, device=DEVICE, dtype=torch.bfloat16) + 0.5, 1e-5) if "norm" in around else None
    residual = torch.randn(rows, n, device=DEVICE, dtype=torch.bfloat16) if "residual" in around else None
    if not takes(x, matrix.packed, matrix.scale):
        assert rows * k > 8 * 4096
        return
    made = int4_rows(x, matrix.packed, matrix.scale, matrix.zero, norm, residual, gated)
    assert error(made, wanted(x, matrix, norm, residual, gated)) < 8e-3
    again = int4_rows(x, matrix.packed, matrix.scale, matrix.zero, norm, residual, gated)
    assert torch.equal(made, again)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 16, 40, 130, 300])
def test_any_rows_times_any_format(kind: str, rows: int) -> None:
    torch.manual_seed(1)
    matrix, gemm = matrix_of(kind, 1536, 1024), QuantizedGemm()
    x = torch.randn(rows, 1024, device=DEVICE, dtype=torch.bfloat16)
    assert error(gemm(x, matrix, None), wanted(x, matrix, None, None, "")) < 5e-2


@pytest.mark.parametrize("rows", [1, 2, 16, 40, 130, 300])
def test_eight_bits_do_not_overflow_in_float16(rows: int) -> None:
    """Where a result is large but fits."""
    torch.manual_seed(1)
    matrix, gemm = matrix_of("int8", 256, 4096), QuantizedGemm()
    row = matrix.dequantized(torch.float32)[7]
    x = torch.randn(rows, 4096, device=DEVICE)
    x[0] = row * (2500 / row.square().sum())
    x = x.half()
    assert error(gemm(x, matrix, None), wanted(x, matrix, None, None, "")) < 5e-3


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 40, 130])
def test_a_feed_forward_layer_is_its_two_gemms(kind: str, rows: int) -> None:
    torch.manual_seed(2)
    gate_up, down, gemm = matrix_of(kind, 2 * 1024, 512), matrix_of(kind, 512, 1024), QuantizedGemm()
    x = torch.randn(rows, 512, device=DEVICE, dtype=torch.bfloat16)
    norm = (torch.rand(512, device=DEVICE, dtype=torch.bfloat16) + 0.5, 1e-5)
    inner = wanted(x, gate_up, norm, None, "silu").bfloat16()
    want = wanted(inner, down, None, x, "")
    assert error(gemm.feed_forward(x.clone(), gate_up, down, norm, x, "silu"), want) < 5e-2


def test_kernels_that_begin_early_see_what_those_before_them_made() -> None:
    """A chain of short GEMMs, each on what the one before gave, replayed many times: the same bits as one by one."""
    torch.manual_seed(3)
    matrices = [matrix_of("int4", 1024, 1024) for _ in range(12)]
    x = torch.randn(1, 1024, device=DEVICE, dtype=torch.bfloat16)

    def chain(wait: bool) -> torch.Tensor:
        made = x
        for matrix in matrices:
            made = int4_rows(made, matrix.packed, matrix.scale, matrix.zero, None, made)
            if wait:
                torch.cuda.synchronize()
        return made

    one_by_one, graph = chain(True), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = chain(False)
    for _ in range(50):
        made.zero_()
        graph.replay()
        assert torch.equal(made, one_by_one)
