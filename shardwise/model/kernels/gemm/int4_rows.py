"""A few rows of input times an int4 matrix, with the norm before and the gate or the residual sum after: `int4_rows.cu`, which
PyTorch compiles with NVRTC at first use. It is not written in Triton, where one cannot choose which thread holds which weight, and
it is bound by the instructions that a weight costs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.model.kernels.dependent_launch import has_dependent_launch, launch_dependent
from shardwise.torch_private import compile_cuda

GROUP = 128
"""Columns that share a scale."""
MOST_ROWS = 8
"""Rows of input: the columns of a tensor core's smallest product."""
LINE_BYTES, MOST_BYTES = 80 * 4, 100 * 1024
"""Shared memory for a row's inputs of one group, and for all inputs, so that two blocks fit on a multiprocessor."""
THREADS = 256
GATES = {"": 0, "silu": 1, "gelu": 2}


class Shape(NamedTuple):
    """Tiles of 16 rows of the matrix that a block takes at a time, blocks on a multiprocessor, and groups of columns that a warp
    loads at a time."""

    tiles: int
    blocks: int
    ahead: int


def takes(x: Tensor, packed: Tensor, scale: Tensor) -> bool:
    """Whether the kernel supports these inputs."""
    rows, k = x.shape
    return (
        0 < rows <= MOST_ROWS
        and x.dtype == scale.dtype == torch.bfloat16
        and k == GROUP * scale.shape[1]
        and _padded(rows) * scale.shape[1] * LINE_BYTES <= MOST_BYTES
        and x.stride(0) % 4 == 0
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def int4_rows(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: str = "",
    shape: Shape | None = None,
) -> Tensor:
    """Rows [rows, in] times a packed matrix [out, in] with scales as `QuantizedMatrix` has them. `norm`, `residual` and `gated` are
    those of `skinny_gemm`."""
    rows, k = x.shape
    n = packed.shape[0] // (2 if gated else 1)
    out = x.new_empty(rows, n)
    padded, own = _padded(rows), 8 if gated else 16
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    shape = shape or shape_of(n, k, padded, processors)
    flags = norm is not None, residual is not None, zero is not None, GATES[gated]
    room = padded * scale.shape[1] * LINE_BYTES
    early = has_dependent_launch(x.device)
    kernel = _kernel(k, padded, shape, *map(int, flags), int(early), room, x.device)
    weight, eps = norm if norm is not None else (x, 0.0)
    grid = min(-(-n // (own * shape.tiles)), shape.blocks * processors)
    arguments = (
        x, packed, scale, scale if zero is None else zero, weight, out if residual is None else residual, out,
        rows, n, x.stride(0), n, eps,
    )  # fmt: skip
    if early:
        launch_dependent(kernel, grid, THREADS, arguments, room)
    else:
        kernel((grid, 1, 1), (THREADS, 1, 1), arguments, room)
    return out


def shape_of(n: int, k: int, padded: int, processors: int) -> Shape:
    """The shape for a matrix of `n` rows and `k` columns. With many rows each block has several tiles, and then loads one tile at
    a time (on an H200 the gate and up matrices of Llama 3 8B took 16.8 us instead of 18.2)."""
    return Shape(1, 2, 4) if n > 64 * processors and padded <= 4 and k % (4 * 8 * GROUP) == 0 else Shape(1, 2, 2)


def _padded(rows: int) -> int:
    return next(size for size in (1, 2, 4, 8) if size >= rows)


@cache
def _kernel(
    k: int, rows: int, shape: Shape, norm: int, residual: int, zero: int, gated: int, early: int, room: int, device: torch.device
) -> Any:  # fmt: skip
    names = dict(
        K=k, XROWS=rows, TILES=shape.tiles, BLOCKS=shape.blocks, AHEAD=shape.ahead, NORM=norm, RESIDUAL=residual,
        ZERO=zero, GATED=gated, EARLY=early,
    )  # fmt: skip
    source = "".join(f"#define {name} {value}\n" for name, value in names.items())
    source += Path(__file__).with_suffix(".cu").read_text()
    with torch.cuda.device(device):
        kernel = compile_cuda(source, "int4_rows")
        kernel.set_shared_memory_config(max(room, 48 * 1024))  # dynamic, in addition to the static shared memory
    return kernel
