"""GEMMs by the algorithm that is known to be fastest for their shape on this kind of machine. Shapes that were never tuned are
recorded for the tuner (`train/tune_gemms.py`), and left to PyTorch.

`Gemm`, and in fp8 `scaled_mm` of `quantized/fp8.py`, is the reference, and returns the same result to the last bit.
"""

from __future__ import annotations

import contextlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.files import cache_folder, write_atomically
from shardwise.model.gemm.cublaslt import Algorithm, LibraryError, Multiplication, Shape, is_aligned, library, version
from shardwise.model.layers import Gemm, Linear
from shardwise.model.operator import differentiate, operator, shape_of
from shardwise.model.quantized.fp8 import scaled_mm

Chosen = tuple[Multiplication, Algorithm]

LEAST = 2**34
"""FLOPs below which a GEMM is left to PyTorch: on an H200 some 25 microseconds, about the cost of its kernel launch."""


class Choices:
    """The algorithms to use on a device, by shape; in a file for the next process. Losing the file does no harm."""

    def __init__(self, device: int, path: Path) -> None:
        self.device, self.path = device, path
        self.known = self._read()
        self.made: dict[Shape, Chosen | None] = {}
        self._multiplication = cache(lambda shape: Multiplication(shape, device))
        self.unknown: dict[Shape, None] = {}  # in the order they came

    def _read(self) -> dict[str, Algorithm | None]:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, IndexError):
            content = json.loads(self.path.read_bytes())
            return {name: Algorithm(bytes.fromhex(one[0]), one[1]) if one else None for name, one in content.items()}
        return {}

    def keep(self, found: dict[Shape, Algorithm | None]) -> None:
        """Use these algorithms from now on, and store them together with those that other processes have written since."""
        self.known = self._read() | self.known | {shape.name: algorithm for shape, algorithm in found.items()}
        self.unknown = {shape: None for shape in self.unknown if shape not in found}
        self.made = {shape: made for shape, made in self.made.items() if shape not in found}
        content = {name: [one.code.hex(), one.workspace] if one else None for name, one in sorted(self.known.items())}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, (json.dumps(content, indent=1) + "\n").encode())

    def of(self, shape: Shape) -> Chosen | None:
        """The GEMM and algorithm for a shape; None where it is left to PyTorch."""
        if shape not in self.made:
            if shape.name not in self.known:
                self.unknown[shape] = None
            self.use(shape, self.known.get(shape.name))
        return self.made[shape]

    def use(self, shape: Shape, algorithm: Algorithm | None) -> None:
        """Use this algorithm from now on."""
        self.made[shape] = None  # and None it stays if the library fails
        if algorithm is not None or shape.adds:  # PyTorch would first copy the tensor that is added to
            multiplication = self._multiplication(shape)
            algorithm = algorithm or multiplication.usual
            self.made[shape] = (multiplication, algorithm) if multiplication.takes(algorithm) else None


@cache
def choices(device: int) -> Choices:
    """The choices for a device of this process."""
    name = torch.cuda.get_device_name(device).replace(" ", "-")
    return Choices(device, cache_folder("products") / f"{name}-{version()}.json")


def multiply_into(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    base: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    fast: bool = False,
) -> bool:
    """Multiply with the chosen algorithm, and add to `base`; returns False where there is none. `scales` and `fast` are for
    fp8."""
    if not out.is_cuda or library() is None or not all(is_aligned(x) for x in (out, base) if x is not None):
        return False
    shape = Shape.of(left, right, out.dtype, adds=base is not None and base is not out, fast=fast)
    if shape is None:
        return False
    try:
        if (chosen := choices(out.device.index).of(shape)) is not None:
            multiplication, algorithm = chosen
            multiplication.run(left, right, out, algorithm, base, scales)
    except LibraryError:
        return False
    return chosen is not None


def worth_tuning(left: Tensor, right: Tensor) -> bool:
    """Whether a GEMM is large enough for its algorithm to matter, on a device that has several."""
    return left.is_cuda and 2 * left.shape[0] * left.shape[1] * right.shape[1] >= LEAST


@operator("gemm(Tensor left, Tensor right) -> Tensor", differentiable=True)
def gemm(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of two matrices."""
    out = left.new_empty((left.shape[0], right.shape[1]))
    return out if multiply_into(left, right, out) else torch.mm(left, right, out=out)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    left, right = inputs
    for_left, for_right = ctx.needs_input_grad[:2]  # further entries are PyTorch's own
    ctx.save_for_backward(left if for_right else None, right if for_left else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    for_left, for_right = ctx.needs_input_grad[:2]  # further entries are PyTorch's own
    # `right` is a matrix [out, in] transposed: its gradient is computed in the memory order of the matrix.
    return gemm(grad, right.mT) if for_left else None, gemm(grad.mT, left).mT if for_right else None


differentiate(gemm, _backward, _keep)


@torch.library.custom_op(
    "shardwise::gemm_into",
    mutates_args=("out",),
    schema="(Tensor left, Tensor right, Tensor(a!) out, bool add) -> ()",
)
def gemm_into(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    """Write `left @ right` to a matrix that may have a higher precision, or add it to that matrix."""
    if not multiply_into(left, right, out, out if add else None):
        Gemm().put(left, right, out, add)


@operator("gemm_onto(Tensor left, Tensor right, Tensor base) -> Tensor")
def gemm_onto(left: Tensor, right: Tensor, base: Tensor) -> Tensor:
    """`base + left @ right`, rounded once."""
    base, out = base.contiguous(), left.new_empty((left.shape[0], right.shape[1]))
    return out if multiply_into(left, right, out, base) else torch.addmm(base, left, right, out=out)


@shape_of(gemm, gemm_onto)
def _(left: Tensor, right: Tensor, base: Tensor | None = None) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]))


@operator(
    "fp8_gemm(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, ScalarType dtype, bool fast) -> Tensor"
)
def fp8_gemm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """`left @ right` of two fp8 matrices, the second column-major, times their scales."""
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    if multiply_into(left, right, out, None, (left_scale, right_scale), fast):
        return out
    del out
    return scaled_mm(left, right.t(), (left_scale, right_scale), dtype, fast=fast)


@operator(
    "fp8_gemm_onto(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, ScalarType dtype, bool fast, "
    "Tensor base) -> Tensor"
)
def fp8_gemm_onto(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool, base: Tensor
) -> Tensor:
    """The same, accumulated onto `base` and rounded once."""
    base, out = base.contiguous(), left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    if multiply_into(left, right, out, base, (left_scale, right_scale), fast):
        return out
    del out
    wide = scaled_mm(left, right.t(), (left_scale, right_scale), torch.float32, fast=fast)
    return (base.float() + wide).to(dtype)


@shape_of(fp8_gemm, fp8_gemm_onto)
def _(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool, base: Tensor | None = None
) -> Tensor:  # fmt: skip
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


class TunedGemm(Gemm):
    """GEMMs by the chosen algorithms; those with a bias, which PyTorch adds before it rounds, are left to PyTorch."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, transposed = x.flatten(0, -2), weight.mT
        if bias is not None or not worth_tuning(rows, transposed):
            return super().__call__(x, weight, bias)
        return gemm(rows, weight.to(x.dtype).mT).unflatten(0, x.shape[:-1])

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return gemm(left, right) if worth_tuning(left, right) else super().multiply(left, right)

    def put(self, left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
        if worth_tuning(left, right):
            gemm_into(left, right, out, add)
        else:
            super().put(left, right, out, add)


def use_tuned_gemms(blocks: nn.Module) -> Gemm:
    """Let the matrices of blocks use tuned GEMMs."""
    chosen = TunedGemm()
    for module in blocks.modules():
        if isinstance(module, Linear):
            module.gemm = chosen
    return chosen


def tuned_scaled_mm(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`scaled_mm`, by the tuned algorithm where the GEMM is large enough; with a scale for each row, by PyTorch's."""
    if any(scale.dim() for scale in scales) or not worth_tuning(left, right.t()):
        return scaled_mm(left, right, scales, dtype, fast=fast)
    return fp8_gemm(left, right.t(), *scales, dtype, fast)
