"""A matrix stored only as fp8 data and scales: the form of a parameter after its shards were all-gathered in fp8.

To autograd it is a tensor of the high-precision dtype, so that its gradient has that dtype. fp8 GEMMs take the data and the scale;
any other operation gets the dequantised matrix. It is a wrapper tensor subclass around two tensors, in the form that PyTorch's
compiler supports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import disabled_torch_function, tree_map_only, wrapper_subclass

_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.as_strided.default)
"""Views of the matrix: they are applied to the data, and keep the scale."""


class Fp8Matrix(torch.Tensor):
    """`fp8_data`, an fp8 matrix, times `scale`: one for the whole matrix, or one for each row."""

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
