"""fp8 GEMMs in the place of the 16-bit ones inside of blocks. Parameters stay float32 and are quantised from there; norms,
attention, routers, experts, embedding and head keep their precision, and so do shapes that are not multiples of 16, which the
hardware does not take.

A step takes three GEMMs: x Wᵀ, and backward dy W and dyᵀ x. Scales are those of the very tensors multiplied, found each time.
`tensorwise`: one scale a tensor, all three in fp8; gradients in e5m2, whose range one scale for all tokens needs (Micikevicius et
al. 2022). `rowwise`: a scale for each token and each row of the matrix, so that e4m3 has range enough for gradients too. The
weight's gradient is a sum over all tokens, whose scales would have to be found along the other side of both operands, by two more
passes over them. So it stays in 16 bits, as in torchao's recipe of that kind: more exact, and a third of the GEMMs slower, which
is the price of this scaling.
The hardware takes both operands by rows along the dimension summed over. So dyᵀ x needs both transposed, which the pass that casts
them does; the backward pass then saves the transposed fp8 input in the place of the 16-bit one.
Accumulation is in full precision in the backward pass: its sums are long, over all tokens for the weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.model.layers import Gemm, Linear
from shardwise.model.quantized.fp8_matrix import Fp8Matrix
from shardwise.model.quantized.scaled import (
    E4M3,
    E5M2,
    amax,
    amax_reference,
    cast,
    cast_rows,
    cast_rows_reference,
    scaled_mm_reference,
    transpose,
)
from shardwise.run import Problem, UserError
from shardwise.run.derive import FP8_ALIGNMENT


def scaled_mm(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`left` [m, k] times `right` [n, k] transposed, both fp8 and by rows; `fast` accumulates in lower precision."""
    if not left.is_cuda:  # PyTorch has it for CPUs, a thousand times slower than plain operations
        return scaled_mm_reference(left, right.t(), *scales, dtype)
    return torch_private.scaled_mm(left, right.t(), *scales, out_dtype=dtype, use_fast_accum=fast)


class ScaledMM(Protocol):
    """What multiplies two fp8 matrices, as the function above does."""

    def __call__(
        self, left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
    ) -> Tensor: ...


class LastQuantized:
    """What the last tensor was quantised to, so that several matrices with one input quantise it once.

    The compiler sees by itself that it would compute the same thing again, so this is for what is not compiled.
    """

    def __init__(self) -> None:
        self.last: weakref.ref[Tensor] | None = None
        self.version = -1
        self.made: tuple[Tensor, ...] | None = None

    def of(self, x: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `make` makes of it, which must be the same function each time."""
        if torch.compiler.is_compiling():
            return make(x)
        if self.made is None or self.last is None or self.last() is not x or self.version != torch_private.version(x):
            self.made, self.version = make(x), torch_private.version(x)
            self.last = weakref.ref(x, self._forget)
        return self.made

    def forget(self) -> None:
        """Let go of it."""
        self.made = self.last = None

    def _forget(self, last: weakref.ref[Tensor]) -> None:
        if last is self.last:
            self.forget()


class Fp8Gemm(Gemm):
    """An fp8 GEMM as autograd takes it; how scales are found is left to the two below."""

    def __init__(self, fallback: Gemm | None = None, multiply_fp8: ScaledMM = scaled_mm) -> None:
        self.learning, self.looking = LastQuantized(), LastQuantized()
        self.fallback = fallback or Gemm()  # multiplies what is not in fp8
        self.multiply_fp8 = multiply_fp8  # and what is

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gemm = self.select(x, weight)
        if gemm is not self:
            return gemm(x, weight, bias)
        if torch.is_grad_enabled():
            out = _Fp8GemmFunction.apply(x, weight, self)
        else:
            out, _ = self.forward(x, weight, learns=False)
        return out if bias is None else out + bias.to(x.dtype)

    def forget(self) -> None:
        """Let go of what the last input was quantised to."""
        self.learning.forget()
        self.looking.forget()

    def select(self, x: Tensor, weight: Tensor) -> Gemm:
        sides = (x.numel() // x.shape[-1], *weight.shape)
        return self if all(side and side % FP8_ALIGNMENT == 0 for side in sides) else self.fallback

    def forward(self, x: Tensor, weight: Tensor, learns: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows of `x` times the matrix; nothing is made for a backward pass unless it `learns`."""
        raise NotImplementedError


class _Fp8GemmFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gemm: Fp8Gemm) -> Tensor:
        out, saved = gemm.forward(x, weight, learns=True)
        ctx.save_for_backward(*saved)
        ctx.gemm, ctx.dtype = gemm, weight.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad, saved = ctx.gemm.grad_input(grads[0], ctx.saved_tensors)
        return grad, ctx.gemm.grad_weight(saved, ctx.dtype), None


def _size(x: Tensor) -> Tensor:
    # The compiler finds the largest where it makes the tensor; else it is one more reading of it, by a kernel.
    return amax_reference(x) if torch.compiler.is_compiling() else amax(x)


def _quantize(x: Tensor, dtype: torch.dtype, transposed: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in fp8, as it is and transposed, and its one scale."""
    x = x.reshape(-1, x.shape[-1]).contiguous()
    return cast(x, _size(x), dtype, True, transposed)


def _quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 and the scales of its rows; compiled, together with what makes it."""
    x = x.reshape(-1, x.shape[-1]).contiguous()
    return cast_rows_reference(x, dtype) if torch.compiler.is_compiling() else cast_rows(x, dtype)


def _transposed(saved: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A matrix transposed, and its scale: made in the forward pass, or now of one that was gathered in fp8."""
    if len(saved) == 2:
        return saved[0], saved[1]
    matrix = saved[0]
    assert isinstance(matrix, Fp8Matrix)
    return transpose(matrix.fp8_data, matrix.scale)


class TensorwiseFp8Gemm(Fp8Gemm):
    """One scale a tensor; all three GEMMs in fp8, gradients in e5m2."""

    def forward(self, x: Tensor, weight: Tensor, learns: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        recent = self.learning if learns else self.looking
        x8, x_t, x_scale = recent.of(x, lambda x: _quantize(x, E4M3, learns))
        if isinstance(weight, Fp8Matrix):  # saved as it came, since who gathered it may let it go in between
            w8, w_scale = weight.fp8_data, weight.scale
            w_saved: tuple[Tensor, ...] = (weight,)
        else:
            w8, w_t, w_scale = _quantize(weight, E4M3, learns)
            w_saved = (w_t, w_scale)
        out = self.multiply_fp8(x8, w8, (x_scale, w_scale), x.dtype, fast=True)
        return out.view(*x.shape[:-1], -1), (x_t, x_scale, *w_saved)

    def grad_input(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        x_t, x_scale, *w_saved = saved
        w_t, w_scale = _transposed(w_saved)
        g8, g_t, g_scale = _quantize(grad, E5M2)
        out = self.multiply_fp8(g8, w_t, (g_scale, w_scale), grad.dtype)
        return out.view(*grad.shape[:-1], -1), (x_t, x_scale, g_t, g_scale)

    def grad_weight(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        x_t, x_scale, g_t, g_scale = saved
        return self.multiply_fp8(g_t, x_t, (g_scale, x_scale), dtype)


class RowwiseFp8Gemm(Fp8Gemm):
    """A scale a row of each operand, all in e4m3; the weight's gradient in 16 bits."""

    def forward(self, x: Tensor, weight: Tensor, learns: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        x8, x_scale = self.learning.of(x, lambda x: _quantize_rows(x, E4M3))
        if isinstance(weight, Fp8Matrix):
            w8, w_scale = weight.fp8_data, weight.scale
            w_saved: tuple[Tensor, ...] = (weight,)
        else:
            w8, w_scale = _quantize_rows(weight, E4M3)
            w_saved = transpose(w8, w_scale) if learns else ()
        out = self.multiply_fp8(x8, w8, (x_scale, w_scale.t()), x.dtype, fast=True)
        return out.view(*x.shape[:-1], -1), (x, *w_saved)

    def grad_input(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, *w_saved = saved
        w_t, w_scale = _transposed(w_saved)
        g8, g_scale = _quantize_rows(grad, E4M3)
        out = self.multiply_fp8(g8, w_t, (g_scale, w_scale.t()), grad.dtype)
        return out.view(*grad.shape[:-1], -1), (x, grad)

    def grad_weight(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return self.fallback.grad_weight(saved, dtype)


GEMMS: dict[str, type[Fp8Gemm]] = {"tensorwise": TensorwiseFp8Gemm, "rowwise": RowwiseFp8Gemm}
"""By the words of `train.fp8`."""


def check_fp8(scaling: str, device: torch.device) -> None:
    """Raise a sentence where 8 bits are asked of a GPU that has none. CPUs compute the same, without being faster."""
    if scaling != "none" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise UserError(Problem(f"{name} multiplies nothing in 8 bits: Ada, Hopper and later do", "train.fp8"))


def use_fp8(blocks: nn.Module, scaling: str, fallback: Gemm | None = None, multiply_fp8: ScaledMM = scaled_mm) -> None:
    """Give the matrices of blocks fp8 GEMMs, and a fallback for shapes that fp8 does not take."""
    gemm = GEMMS[scaling](fallback, multiply_fp8)

    def forget(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            gemm.forget()

    for module in blocks.modules():
        if isinstance(module, Linear):
            module.gemm = gemm
        elif any(isinstance(child, Linear) for child in module.children()):
            module.register_forward_hook(forget)
