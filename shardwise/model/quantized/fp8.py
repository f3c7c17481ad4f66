"""fp8 GEMMs instead of the 16-bit ones inside blocks. Parameters stay float32 and are quantised from there. Norms, attention,
routers, experts, embedding and head keep their precision, and so do GEMMs whose shapes are not multiples of 16, which the hardware
does not support.

A step takes three GEMMs: x Wᵀ, and backward dy W and dyᵀ x. Scales are computed each time from the very tensors multiplied.
`tensorwise`: one scale a tensor, all three in fp8; gradients in e5m2, since one scale for all tokens needs its range (Micikevicius
et al. 2022). `rowwise`: a scale for each token and each row of the matrix, so that e4m3 has range enough for gradients too. The
weight's gradient is a sum over all tokens, so its scales would have to be computed along the other dimension of both operands, by
two more passes over them. So it stays in 16 bits, as in torchao's recipe of that kind. That is more exact, but a third of the
GEMMs are slower, which is the price of this scaling.
The hardware takes both operands by rows along the dimension summed over. So dyᵀ x needs both transposed, which the casting pass
does; the transposed fp8 input is then saved for backward instead of the 16-bit one.
The backward pass accumulates in full precision: its sums are long, over all tokens for the weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.model.layers import Gemm, Linear
from shardwise.model.quantized.formats import E4M3, E5M2
from shardwise.model.quantized.scaled import (
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
from shardwise.torch_private import disabled_torch_function, tree_map_only, wrapper_subclass

_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.as_strided.default)
"""Views of the matrix: they are applied to the data, and keep the scale."""


class Fp8Matrix(torch.Tensor):
    """A matrix stored only as fp8 data and scales: `fp8_data` times `scale`, one for the whole matrix, or one for each row. It is
    the form of a parameter after its shards were all-gathered in fp8.

    To autograd it is a tensor of the high-precision dtype, so that its gradient has that dtype. fp8 GEMMs take the data and the
    scale; any other operation gets the dequantised matrix. It is a wrapper tensor subclass around two tensors, in the form that
    PyTorch's compiler supports.
    """

    fp8_data: Tensor
    scale: Tensor

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, fp8_data: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Matrix:
        return wrapper_subclass(cls, fp8_data, dtype)

    def __init__(self, fp8_data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.fp8_data, self.scale = fp8_data, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fp8Matrix({tuple(self.shape)}, {self.fp8_data.dtype} for {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["fp8_data", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Fp8Matrix:
        return Fp8Matrix(inner["fp8_data"], inner["scale"], dtype)

    def dequantized(self) -> Tensor:
        """The matrix in the high-precision dtype."""
        return (self.fp8_data.float() * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator in _VIEWS:
            return cls(operator(args[0].fp8_data, *args[1:]), args[0].scale, args[0].dtype)
        args, kwargs = tree_map_only(cls, lambda matrix: matrix.dequantized(), (args, kwargs or {}))
        return operator(*args, **kwargs)


def scaled_mm(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`left` [m, k] times `right` [n, k] transposed, both fp8 and row-major; `fast` accumulates in lower precision."""
    if not left.is_cuda:  # PyTorch has it for CPUs, a thousand times slower than plain operations
        return scaled_mm_reference(left, right.t(), *scales, dtype)
    return torch_private.scaled_mm(left, right.t(), *scales, out_dtype=dtype, use_fast_accum=fast)


class ScaledMM(Protocol):
    """A function that multiplies two fp8 matrices, as the one above does."""

    def __call__(
        self, left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
    ) -> Tensor: ...


class LastQuantized:
    """Caches the quantised form of the last tensor, so that several matrices with one input quantise it once.

    The compiler finds such repeated computations by itself, so this is for code that is not compiled.
    """

    def __init__(self) -> None:
        self.last: weakref.ref[Tensor] | None = None
        self.version = -1
        self.made: tuple[Tensor, ...] | None = None

    def of(self, x: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The result of `make` on `x`; `make` must be the same function each time."""
        if torch.compiler.is_compiling():
            return make(x)
        if self.made is None or self.last is None or self.last() is not x or self.version != torch_private.version(x):
            self.made, self.version = make(x), torch_private.version(x)
            self.last = weakref.ref(x, self._forget)
        return self.made

    def forget(self) -> None:
        """Drop the cached tensors."""
        self.made = self.last = None

    def _forget(self, last: weakref.ref[Tensor]) -> None:
        if last is self.last:
            self.forget()


class Fp8Gemm(Gemm):
    """An fp8 GEMM with its autograd function; the two subclasses below choose the scales."""

    def __init__(self, fallback: Gemm | None = None, multiply_fp8: ScaledMM = scaled_mm) -> None:
        self.learning, self.looking = LastQuantized(), LastQuantized()
        self.fallback = fallback or Gemm()  # for GEMMs that are not in fp8
        self.multiply_fp8 = multiply_fp8  # for those that are

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
        """Drop the quantised form of the last input."""
        self.learning.forget()
        self.looking.forget()

    def select(self, x: Tensor, weight: Tensor) -> Gemm:
        sides = (x.numel() // x.shape[-1], *weight.shape)
        return self if all(side and side % FP8_ALIGNMENT == 0 for side in sides) else self.fallback

    def forward(self, x: Tensor, weight: Tensor, learns: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows of `x` times the matrix; tensors for the backward pass are only made if it `learns`."""
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
    # The compiler fuses the amax into the kernel that makes the tensor; otherwise it is one more read, by a kernel.
    return amax_reference(x) if torch.compiler.is_compiling() else amax(x)


def _quantize(x: Tensor, dtype: torch.dtype, transposed: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in fp8, as stored and transposed, and its one scale."""
    x = x.reshape(-1, x.shape[-1]).contiguous()
    return cast(x, _size(x), dtype, True, transposed)


def _quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 and the scales of its rows; when compiled, fused with the kernel that makes the matrix."""
    x = x.reshape(-1, x.shape[-1]).contiguous()
    return cast_rows_reference(x, dtype) if torch.compiler.is_compiling() else cast_rows(x, dtype)


def _transposed(saved: list[Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
    """A transposed matrix and its scale: made in the forward pass, or now that there is a gradient, from a matrix that was
    all-gathered in fp8."""
    if len(saved) == 2:
        return saved[0], saved[1]
    matrix = saved[0]
    assert isinstance(matrix, Fp8Matrix)
    return transpose(matrix.fp8_data, matrix.scale, grad)


class TensorwiseFp8Gemm(Fp8Gemm):
    """One scale a tensor; all three GEMMs in fp8, gradients in e5m2."""

    def forward(self, x: Tensor, weight: Tensor, learns: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        recent = self.learning if learns else self.looking
        x8, x_t, x_scale = recent.of(x, lambda x: _quantize(x, E4M3, learns))
        if isinstance(weight, Fp8Matrix):  # saved as it is, since the gathered data may be freed in between
            w8, w_scale = weight.fp8_data, weight.scale
            w_saved: tuple[Tensor, ...] = (weight,)
        else:
            w8, w_t, w_scale = _quantize(weight, E4M3, learns)
            w_saved = (w_t, w_scale)
        out = self.multiply_fp8(x8, w8, (x_scale, w_scale), x.dtype, fast=True)
        return out.view(*x.shape[:-1], -1), (x_t, x_scale, *w_saved)

    def grad_input(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        x_t, x_scale, *w_saved = saved
        w_t, w_scale = _transposed(w_saved, grad)
        g8, g_t, g_scale = _quantize(grad, E5M2)
        out = self.multiply_fp8(g8, w_t, (g_scale, w_scale), grad.dtype)
        return out.view(*grad.shape[:-1], -1), (x_t, x_scale, g_t, g_scale)

    def grad_weight(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        x_t, x_scale, g_t, g_scale = saved
        return self.multiply_fp8(g_t, x_t, (g_scale, x_scale), dtype)


class RowwiseFp8Gemm(Fp8Gemm):
    """A scale for each row of both operands, all in e4m3; the weight's gradient in 16 bits."""

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
        w_t, w_scale = _transposed(w_saved, grad)
        g8, g_scale = _quantize_rows(grad, E4M3)
        out = self.multiply_fp8(g8, w_t, (g_scale, w_scale.t()), grad.dtype)
        return out.view(*grad.shape[:-1], -1), (x, grad)

    def grad_weight(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return self.fallback.grad_weight(saved, dtype)


GEMMS: dict[str, type[Fp8Gemm]] = {"tensorwise": TensorwiseFp8Gemm, "rowwise": RowwiseFp8Gemm}
"""By the values of `train.fp8`."""


def check_fp8(scaling: str, device: torch.device) -> None:
    """Raise an error where fp8 is asked of a GPU without it. CPUs compute the same, without being faster."""
    if scaling != "none" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise UserError(Problem(f"{name} multiplies nothing in 8 bits: Ada, Hopper and later do", "train.fp8"))


def use_fp8(blocks: nn.Module, scaling: str, fallback: Gemm | None = None, multiply_fp8: ScaledMM = scaled_mm) -> None:
    """Give the matrices of blocks fp8 GEMMs, and a fallback for shapes that fp8 does not support."""
    gemm = GEMMS[scaling](fallback, multiply_fp8)

    def forget(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            gemm.forget()

    for module in blocks.modules():
        if isinstance(module, Linear):
            module.gemm = gemm
        elif any(isinstance(child, Linear) for child in module.children()):
            module.register_forward_hook(forget)
