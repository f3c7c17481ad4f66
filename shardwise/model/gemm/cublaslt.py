"""cuBLASLt, the library that PyTorch multiplies matrices with on NVIDIA's GPUs, called directly. PyTorch takes the algorithm that
the library proposes first; here any of its proposals may be used.

The library's matrices are column-major and PyTorch's row-major, so it is asked for the transposed GEMM of transposed operands.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import raw_stream

# The library's enum values (cublasLt.h, library_types.h).
TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
COMPUTE_FLOAT32 = 68
TRANSPOSE_LEFT, TRANSPOSE_RIGHT = 3, 4
SCALE_LEFT, SCALE_RIGHT, FAST_SUMS = 17, 18, 25
MOST_WORKSPACE, REDUCTIONS = 1, 3
IN_FULL_PRECISION = 2
"""Parts of a sum are added outside of the output, in float32; the other ways round them to the output's dtype."""
ALIGNMENTS = (5, 6, 7, 8)

WORKSPACE = 2**25
"""Bytes of workspace that an algorithm may ask for; PyTorch allows as many on such GPUs."""
ALIGNED = 16
"""Bytes to which matrices and their rows are aligned."""
PROPOSALS = 32
"""How many algorithms the library is asked for; it knows fewer."""

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@dataclass(frozen=True)
class Shape:
    """A GEMM, [rows, depth] times [depth, columns], and the memory layout of its operands."""

    rows: int
    columns: int
    depth: int
    left_transposed: bool  # whether an operand is column-major
    right_transposed: bool
    left_step: int  # elements from a row to the next, or from a column to the next where it is column-major
    right_step: int
    left_dtype: torch.dtype
    right_dtype: torch.dtype
    out_dtype: torch.dtype
    adds: bool = False  # whether another matrix, which stays unchanged, is added
    fast: bool = False  # in fp8: whether sums may be accumulated in fewer bits

    @staticmethod
    def of(left: Tensor, right: Tensor, out_dtype: torch.dtype, adds: bool = False, fast: bool = False) -> Shape | None:
        """The shape of a GEMM of two matrices, or None where the library does not support them."""
        lies, other = _lies(left), _lies(right)
        if lies is None or other is None or not {left.dtype, right.dtype, out_dtype} <= set(TYPES):
            return None
        eight = {left.element_size(), right.element_size()} == {1}
        # In fp8, where the two formats may differ, the hardware needs both operands contiguous along the summed
        # dimension.
        if (lies[0], other[0]) != (False, True) if eight else left.dtype != right.dtype:
            return None
        sizes = (left.shape[0], right.shape[1], left.shape[1])
        return Shape(*sizes, lies[0], other[0], lies[1], other[1], left.dtype, right.dtype, out_dtype, adds, fast)

    @property
    def fp8(self) -> bool:
        """Whether operands are fp8, with scales."""
        return self.left_dtype.itemsize == 1

    @property
    def name(self) -> str:
        """All fields in one string."""
        lies = "".join("rc"[transposed] for transposed in (self.left_transposed, self.right_transposed))
        dtypes = [self.left_dtype, *([self.right_dtype] if self.fp8 else []), self.out_dtype]
        types = " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        name = f"{self.rows}x{self.columns}x{self.depth} {lies} {self.left_step} {self.right_step} {types}"
        return name + " adds" * self.adds + " fast" * self.fast


def _lies(x: Tensor) -> tuple[bool, int] | None:
    """Whether a matrix is column-major, and the elements from one row or column to the next; None where it is not supported."""
    transposed = x.stride(1) != 1
    step, inner = (x.stride(1), x.stride(0)) if transposed else x.stride()
    long = step >= x.shape[0 if transposed else 1]
    aligned = x.data_ptr() % ALIGNED == 0 and step * x.element_size() % ALIGNED == 0
    return (transposed, step) if inner == 1 and long and aligned else None


def is_aligned(out: Tensor) -> bool:
    """Whether a matrix may be written, or added to: contiguous, and aligned as kernels need it."""
    return out.is_contiguous() and out.data_ptr() % ALIGNED == 0 and out.shape[1] * out.element_size() % ALIGNED == 0


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Algorithm:
    """One of the library's ways to compute a GEMM; its bytes mean the same to the same version of the library."""

    code: bytes
    workspace: int


class LibraryError(RuntimeError):
    """The library refused."""


@cache
def library() -> Any:
    """The library that PyTorch has loaded, or None."""
    if torch.version.cuda is None:
        return None
    try:  # `PyDLL` holds the GIL: a launch takes a few microseconds, unless a thousand others wait to begin
        return ctypes.PyDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@cache
def version() -> int:
    """The library's version."""
    library().cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library().cublasLtGetVersion())


def _call(name: str, *args: Any) -> None:
    if status := getattr(library(), name)(*args):
        raise LibraryError(f"{name} answered {status}")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(made))
    return made


class Multiplication:
    """GEMMs of one shape on one device. The library's descriptors for it are small and never freed."""

    def __init__(self, shape: Shape, device: int) -> None:
        self.handle = _handle(device)
        self.how = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.how), COMPUTE_FLOAT32, TYPES[torch.float32])
        self._set(TRANSPOSE_LEFT, ctypes.c_int32(shape.right_transposed))
        self._set(TRANSPOSE_RIGHT, ctypes.c_int32(shape.left_transposed))
        if shape.fp8:
            self._set(FAST_SUMS, ctypes.c_int8(shape.fast))
            self.one = torch.ones((), device=torch.device("cuda", device))
            self._scale(self.one, self.one)  # proposals are for GEMMs with scales
        self.first = _layout(shape.right_dtype, shape.columns, shape.depth, shape.right_transposed, shape.right_step)
        self.second = _layout(shape.left_dtype, shape.depth, shape.rows, shape.left_transposed, shape.left_step)
        self.out = _layout(shape.out_dtype, shape.columns, shape.rows, False, shape.columns)
        self.layouts = (self.first, self.second, self.out, self.out)

    def _set(self, attribute: int, value: Any) -> None:
        _call("cublasLtMatmulDescSetAttribute", self.how, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def _scale(self, left: Tensor, right: Tensor) -> None:
        self._set(SCALE_LEFT, ctypes.c_void_p(right.data_ptr()))
        self._set(SCALE_RIGHT, ctypes.c_void_p(left.data_ptr()))

    def proposed(self) -> list[Algorithm]:
        """The library's proposals, the best first."""
        wanted = ctypes.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(wanted))
        for attribute, value in (
            (MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE)),
            (REDUCTIONS, ctypes.c_uint32(IN_FULL_PRECISION)),
            *((a, ctypes.c_uint32(ALIGNED)) for a in ALIGNMENTS),
        ):
            size = ctypes.sizeof(value)
            _call("cublasLtMatmulPreferenceSetAttribute", wanted, attribute, ctypes.byref(value), size)
        found, count = (_Proposal * PROPOSALS)(), ctypes.c_int()
        how = (self.handle, self.how, *self.layouts, wanted)
        _call("cublasLtMatmulAlgoGetHeuristic", *how, PROPOSALS, found, ctypes.byref(count))
        _call("cublasLtMatmulPreferenceDestroy", wanted)
        proposed = [Algorithm(bytes(one.algorithm), one.workspace) for one in found[: count.value] if one.status == 0]
        if not proposed:
            raise LibraryError("no algorithm is proposed")
        return proposed

    @cached_property
    def usual(self) -> Algorithm:
        """The library's first proposal."""
        return self.proposed()[0]

    def takes(self, algorithm: Algorithm) -> bool:
        """Whether the library accepts this algorithm for this GEMM."""
        if len(algorithm.code) != ctypes.sizeof(ctypes.c_uint64 * 8):
            return False
        found, check = _Proposal(), library().cublasLtMatmulAlgoCheck
        status = check(self.handle, self.how, *self.layouts, algorithm.code, ctypes.byref(found))
        return status == 0 and found.workspace <= algorithm.workspace

    def run(
        self,
        left: Tensor,
        right: Tensor,
        out: Tensor,
        algorithm: Algorithm,
        base: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write the result to `out`, added to `base` if there is one, which may be `out` itself; fp8 operands have a scale each,
        in float32 on the device."""
        space = torch.empty(algorithm.workspace, dtype=torch.uint8, device=out.device) if algorithm.workspace else None
        target = ctypes.c_void_p(out.data_ptr())
        if scales is not None:
            self._scale(*scales)  # in the descriptor that all GEMMs of this shape share: nothing may come in between
        _call(
            "cublasLtMatmul", self.handle, self.how,
            ctypes.byref(_ONE), ctypes.c_void_p(right.data_ptr()), self.first, ctypes.c_void_p(left.data_ptr()), self.second,
            ctypes.byref(_ZERO if base is None else _ONE),
            target if base is None else ctypes.c_void_p(base.data_ptr()), self.out, target, self.out,
            algorithm.code, ctypes.c_void_p(space.data_ptr() if space is not None else None),
            ctypes.c_size_t(algorithm.workspace), ctypes.c_void_p(raw_stream(out.device.index)),
        )  # fmt: skip


def _layout(dtype: torch.dtype, rows: int, columns: int, transposed: bool, step: int) -> ctypes.c_void_p:
    """The library's layout of a matrix [rows, columns], column-major or transposed in memory."""
    made = ctypes.c_void_p()
    sides = (columns, rows) if transposed else (rows, columns)
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(made), TYPES[dtype], *(ctypes.c_uint64(side) for side in sides),
        ctypes.c_int64(step),
    )  # fmt: skip
    return made
