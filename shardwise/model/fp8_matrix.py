"""A matrix that is there in 8 bits only, and stands for a wider one: what a parameter is after its shards were gathered in 8 bits.

To autograd it is a tensor of the wide dtype, so that its gradient is wide. Products in 8 bits take its insides; any other
operation gets the wide numbers they stand for. It is a tensor subclass that wraps two tensors, as PyTorch's compiler knows them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_SEEN = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.as_strided.default)
"""Operations that only look at the matrix another way: the 8 bits and the scale go with them."""


class Fp8Matrix(torch.Tensor):
    """`fp8_data`, a matrix in 8 bits, times `scale`: one number, or one a row."""

    fp8_data: Tensor
    scale: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, fp8_data: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Matrix:
        return torch.Tensor._make_wrapper_subclass(
            cls, fp8_data.shape, strides=fp8_data.stride(), dtype=dtype, device=fp8_data.device
        )

    def __init__(self, fp8_data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.fp8_data, self.scale = fp8_data, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedMatrix({tuple(self.shape)}, {self.fp8_data.dtype} for {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["fp8_data", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Fp8Matrix:
        return Fp8Matrix(inner["fp8_data"], inner["scale"], dtype)

    def wide(self) -> Tensor:
        """The numbers it stands for."""
        return (self.fp8_data.float() * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator in _SEEN:
            return cls(operator(args[0].fp8_data, *args[1:]), args[0].scale, args[0].dtype)
        args, kwargs = tree_map_only(cls, lambda matrix: matrix.wide(), (args, kwargs or {}))
        return operator(*args, **kwargs)
