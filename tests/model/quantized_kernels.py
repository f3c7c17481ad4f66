"""What `test_quantized.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: the kernels of packed
matrices against plain PyTorch."""

from __future__ import annotations

import os
import sys
from itertools import product

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.kernels.dequantize import dequantize_int4
from shardwise.model.kernels.gemm.skinny import skinny_gemm_reference
from shardwise.model.kernels.gemm.weight_only import Shape, weight_only_gemm
from shardwise.model.kernels.gemm.weight_only_tiles import Tile, TileScratch, tiled_gemm
from shardwise.model.kernels.quantize import fp8_rows
from shardwise.model.quantized.linear import MOST_TILED, QuantizedGemm, quantized_linear_reference
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import round_matrix
from shardwise.model.quantized.scaled import cast_rows_reference
from shardwise.run.weights import QUANTIZED, WeightFormat

FORMS = {**QUANTIZED, "symmetric": WeightFormat("int4", 128), "small groups": WeightFormat("int4", 32, zeros=True)}


def drawn(n: int, k: int, form: WeightFormat) -> tuple[QuantizedMatrix, tuple[Tensor, Tensor, Tensor | None, str]]:
    matrix = round_matrix(torch.randn(n, k) * 0.05 + 0.01, form, torch.float32)
    assert matrix is not None
    return matrix, (matrix.packed, matrix.scale, matrix.zero, form.kind)


def skinny() -> None:
    for (number, (name, form)), (rows, (n, k), unrolled), gated in product(
        enumerate(FORMS.items()), ((1, (6, 1280), 4), (2, (4, 1536), 0)), ("", "silu")
    ):
        x, residual = torch.randn(rows, k), torch.randn(rows, n // 2 if gated else n)
        matrix, parts = drawn(n, k, form)
        # Every two of form, shape, gate and what lies around the product meet.
        normed = (number + rows + bool(gated)) % 2
        before, after = ((torch.rand(k), 1e-5), None) if normed else (None, residual)
        found = weight_only_gemm(x, *parts, before, after, gated, Shape(1, unrolled))
        wanted = skinny_gemm_reference(x, matrix.dequantized(), before, after, gated)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=4e-4, msg=f"{name} {rows} {gated}")
    x = torch.randn(1, 1024).bfloat16()  # in the shape that a GPU gets, and its dtype
    for kind in QUANTIZED:
        matrix, parts = drawn(16, 1024, QUANTIZED[kind])
        found, wanted = weight_only_gemm(x, *parts), x.float() @ matrix.dequantized().T
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)


def tiles() -> None:
    scratch = TileScratch(torch.device("cpu"))
    for (number, name), (rows, (n, k), programs), gated in product(
        enumerate(("fp8", "int8", "int4", "symmetric")), ((3, (40, 512), 1), (20, (70, 640), 8)), ("", "silu")
    ):
        x, residual = torch.randn(rows, k), torch.randn(rows, n // 2 if gated else n)
        matrix, parts = drawn(n, k, FORMS[name])
        after = residual if (number + rows + bool(gated)) % 2 else None  # every two of them meet
        found = tiled_gemm(x, *parts, scratch, after, gated, Tile(32, 128, 4, 2, programs))
        wanted = skinny_gemm_reference(x, matrix.dequantized(), None, after, gated)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=4e-4, msg=f"{name} {rows} {gated}")
    for gated in ("", "silu"):  # fp8 on both sides
        matrix, parts = drawn(40, 384, FORMS["fp8"])
        values, scale = cast_rows_reference(torch.randn(5, 384), torch.float8_e4m3fn)
        found = tiled_gemm(values, *parts, scratch, None, gated, Tile(32, 128, 4, 2, 4), scale, torch.float32)
        wanted = skinny_gemm_reference(values.float() * scale, matrix.dequantized(), None, None, gated)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    x = torch.randn(3, 256)
    matrix, parts = drawn(32, 256, FORMS["int4"])
    # Four bits get an exponent; in bfloat16 too, but the interpreter multiplies no bfloat16.
    found = tiled_gemm(x.half(), *parts, scratch, shape=Tile(32, 128, 4, 2, 1))
    torch.testing.assert_close(found.float(), x.half().float() @ matrix.dequantized().T, rtol=1e-2, atol=2e-2)
    assert not scratch.arrived.any()


def dequantize() -> None:
    for name in ("int4", "symmetric", "small groups"):
        matrix, parts = drawn(10, 640, FORMS[name])
        found = dequantize_int4(*parts[:3], torch.float32)
        torch.testing.assert_close(found, matrix.dequantized(), rtol=0, atol=0)


class OnGpu(Tensor):
    """A tensor of the CPU that passes for one of a GPU."""

    is_cuda = True


def many_rows() -> None:
    """So many that the matrix is not read packed. A result of 2,500, as some activations are (Sun et al. 2024), fits float16."""
    weight, x = torch.randn(64, 1024) * 0.02, torch.randn(MOST_TILED["int8"] + 44, 1024)
    x[0] = weight[7] * (2500 / weight[7].square().sum())
    for dtype in (torch.float16, torch.bfloat16):
        matrix, rows = round_matrix(weight, QUANTIZED["int8"], dtype), x.to(dtype)
        assert matrix is not None
        wanted = quantized_linear_reference(rows, matrix)
        assert float(wanted.abs().max()) > 2400
        found = QuantizedGemm().fused(rows.as_subclass(OnGpu), matrix).as_subclass(Tensor)
        assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 1e-2, dtype


def fp8_inputs() -> None:
    x, norm = torch.randn(3, 200), (torch.rand(100) + 0.5, 1e-5)
    gate, up = x.chunk(2, dim=1)
    cases = {
        "as it is": (fp8_rows(x), x),
        "normed": (fp8_rows(up, norm), F.rms_norm(up, (100,), *norm)),
        "gated": (fp8_rows(x, gated="silu"), F.silu(gate) * up),
    }
    for name, ((values, scale), wanted) in cases.items():
        expected, expected_scale = cast_rows_reference(wanted, torch.float8_e4m3fn)
        assert torch.equal(scale, expected_scale), name
        # The interpreter forgets a carry into the exponent as it rounds, a few times in a hundred.
        assert float((values.float() != expected.float()).float().mean()) < 0.08, name


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        {"skinny": skinny, "tiles": tiles, "dequantize": dequantize, "many rows": many_rows, "fp8": fp8_inputs}[name]()
