"""Launches a kernel of `compile_cuda` before the previous kernel has ended (programmatic dependent launch, in NVIDIA's CUDA C++
Programming Guide). It may load weights, which no kernel writes, and waits with `griddepcontrol.wait` until all earlier kernels are
done. So many short memory-bound kernels run without gaps between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import raw_stream

SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION (cuda.h)."""


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device's kernels may begin before the previous ones have ended, and the driver supports such launches."""
    return (
        torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0) and hasattr(_driver(), "cuLaunchKernelEx")
    )  # fmt: skip


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def launch_dependent(
    kernel: Any, grid: int, block: int, arguments: Sequence[Tensor | int | float], shared: int
) -> None:
    """Launch a kernel on the current stream, to begin as soon as there is room."""
    values = [_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    attribute = _Attribute(SERIALIZATION, 0, (ctypes.c_int * 16)(1))
    sizes = (ctypes.c_uint * 3)(grid, 1, 1), (ctypes.c_uint * 3)(block, 1, 1)
    config = _Config(*sizes, shared, raw_stream(torch.cuda.current_device()), ctypes.pointer(attribute), 1)
    status = _driver().cuLaunchKernelEx(ctypes.byref(config), kernel.func, pointers, None)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx answered {status}")


def _value(argument: Tensor | int | float) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_double(argument)
