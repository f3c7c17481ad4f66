"""The small parts of the network: matrices, embeddings, norms and the feed-forward layer.

Parameters are cast to the dtype of the activations where they are used. So the same network computes in 16 bits over
float32 parameters, in pure float64, or over parameters that a sharding wrapper has already cast; and gradients arrive in
the dtype of the parameters without an autocast context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.run import ModelConfig


def at_least_float32(x: Tensor) -> Tensor:
    """16-bit tensors cast to float32, for computations that 16 bits would spoil; others unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Gemm:
    """How matrices are multiplied; this class uses PyTorch, in the dtype of the input. `multiply` and `put` take any two matrices.
    A layer calls the object for the whole GEMM, or calls its three training steps separately.

    `forward` returns the result and the tensors to save for backward; `grad_input` returns the input's gradient and the tensors
    that the weight's gradient needs; `grad_weight` returns that gradient, in the dtype of the weight.
    """

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """The product of two matrices."""
        return left @ right

    def put(self, left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
        """Write the product of two matrices to `out`, which may have a higher precision, or add it to `out`."""
        if out.dtype == left.dtype and not add:
            torch.mm(left, right, out=out)
        elif out.is_cuda and out.dtype != left.dtype:
            torch.addmm(out, left, right, beta=1.0 if add else 0.0, out_dtype=out.dtype, out=out)
        else:
            out.addmm_(left.to(out.dtype), right.to(out.dtype), beta=1.0 if add else 0.0)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def select(self, x: Tensor, weight: Tensor) -> Gemm:
        """The GEMM that supports these shapes: this one, or its fallback."""
        return self

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows of `x` times the matrix [out, in]."""
        cast = weight.to(x.dtype)
        return self.multiply(x.flatten(0, -2), cast.mT).unflatten(0, x.shape[:-1]), (x, cast)

    def grad_input(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient of `x`."""
        x, weight = saved
        return self.multiply(grad.flatten(0, -2), weight).view_as(x), (x, grad)

    def grad_weight(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The gradient of the matrix."""
        x, grad = saved
        return self.multiply(grad.flatten(0, -2).mT, x.flatten(0, -2)).to(dtype)


class Linear(nn.Linear):
    """`nn.Linear` computed in the dtype of its input. `gemm` multiplies and may be replaced; a `compute_copy`, if set, is used
    instead of the matrix."""

    gemm: Gemm = Gemm()
    compute_copy: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora: Any = None
        """An adapter; its output is added (`adapters.py`)."""

    @classmethod
    def taking_over(cls, linear: Linear) -> Self:
        """A layer of this class that replaces another: the same parameters, multiplied by the same GEMM."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        made.weight, made.bias, made.gemm, made.lora = linear.weight, linear.bias, linear.gemm, linear.lora
        return made

    def forward(self, x: Tensor) -> Tensor:
        # The adapter first: recomputation then stops before the larger GEMM.
        low_rank = self.low_rank(x)
        if low_rank is None:
            return self.gemm(x, self.weight if self.compute_copy is None else self.compute_copy, self.bias)
        if not self.lora.rescales:
            return self.gemm(x, self.weight, self.bias) + low_rank
        out = self.lora.join(self.gemm(x, self.weight, None), low_rank, self.weight)
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def low_rank(self, x: Tensor) -> Tensor | None:
        """The adapter's term of the output; None without an adapter."""
        return None if self.lora is None else self.lora(x)

    def joined(self, out: Tensor, low_rank: Tensor | None) -> Tensor:
        """`out`, the output without its bias, combined with the adapter's term."""
        return out if low_rank is None or self.lora is None else self.lora.join(out, low_rank, self.weight)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of the last dimension, or LayerNorm where there is a bias."""
    shape = (x.shape[-1],)
    if bias is None:
        return F.rms_norm(x, shape, weight.to(x.dtype), eps)
    return F.layer_norm(x, shape, weight.to(x.dtype), bias.to(x.dtype), eps)


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), or LayerNorm when `centered`. `normalize` computes it and may be replaced by another
    function."""

    normalize: Callable[[Tensor, Tensor, Tensor | None, float], Tensor] = staticmethod(normalize)

    def __init__(self, width: int, eps: float, centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if centered else None

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig) -> Norm:
    """The norm that stands before each block."""
    return Norm(config.hidden, config.norm_eps, centered=config.norm == "layernorm")


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": _gelu,
    "gelu": _gelu,
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
}
"""The activation between the matrices of a feed-forward layer, or on its gate."""


def gated(function: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """`up` times a function of its gate."""
    return function(gate) * up


class FeedForward(nn.Module):
    """Two matrices with an activation between them, which may be gated by a third matrix (Shazeer 2020). `gated` computes the
    product and may be replaced by another function."""

    gated: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor] = staticmethod(gated)

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        bias = config.bias == "all"
        self.function = ACTIVATIONS[config.activation]
        self.gate = Linear(config.hidden, width, bias=bias) if config.gated else None
        self.up = Linear(config.hidden, width, bias=bias)
        self.down = Linear(width, config.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(self.gated(self.function, self.gate(x), self.up(x)))
        return self.down(self.function(self.up(x)))
