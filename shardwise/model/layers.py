"""The small parts of the network: matrices, embeddings, norms and the feed-forward layer.

Parameters are cast to the dtype of the activations where they are used. So the same network computes in 16 bits over
float32 parameters, in pure float64, or over parameters that a sharding wrapper has already cast; and gradients arrive in
the dtype of the parameters without an autocast context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.run import ModelConfig


def at_least_float32(x: Tensor) -> Tensor:
    """16-bit numbers widened, for arithmetic that 16 bits would spoil; wider ones as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix in the dtype of its products. On a GPU one that is wider than tall is written transposed as it is cast: products
    that read it row by row are slower there (on an H200 by 8% forward and 15% back, 8192 to 2048 numbers)."""
    if weight.dtype == dtype or not weight.is_cuda or weight.shape[-1] <= weight.shape[-2]:
        return weight.to(dtype)
    return weight.mT.to(dtype, memory_format=torch.contiguous_format).mT


class Linear(nn.Linear):
    """`nn.Linear` computed in the dtype of its input. `product` is what multiplies: another may be put in its place."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.to(x.dtype) if self.bias is not None else None
        return self.product(x, narrowed(self.weight, x.dtype), bias)


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), or LayerNorm when `centered`."""

    def __init__(self, width: int, eps: float, centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if centered else None

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        if self.bias is None:
            return F.rms_norm(x, shape, self.weight.to(x.dtype), self.eps)
        return F.layer_norm(x, shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


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
    "relu": F.relu,
    "relu2": _squared_relu,
}
"""The function between the matrices of a feed-forward layer, or on its gate."""


class FeedForward(nn.Module):
    """Two matrices with a function between them, which may be gated by a third matrix (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        bias = config.bias == "all"
        self.function = ACTIVATIONS[config.activation]
        self.gate = Linear(config.hidden, width, bias=bias) if config.gated else None
        self.up = Linear(config.hidden, width, bias=bias)
        self.down = Linear(width, config.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(self.function(self.gate(x)) * self.up(x))
        return self.down(self.function(self.up(x)))
