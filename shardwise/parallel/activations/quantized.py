"""Saved tensors in 8, 4 or 2 bits (ActNN, Chen et al. 2021): each group of values is coded in even steps between its least and its
largest, rounded up or down at random so that the mean is right.

A tensor is padded to whole groups, each with its least value and its step in bfloat16, rounded so that the codes still span the
group. A hash of a value's bits and its position
decides the rounding, so there is no random state that a checkpoint would have to hold: the same tensor is always rounded the same
way. On a GPU each direction is one kernel (`model/kernels/group_bits.py`), with the same bits. Bytes: `run/saved_tensors.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.run.saved_tensors import GROUP, groups_of

AT_ONCE = 2**22
"""Values that are quantized or dequantized at a time, so that temporary memory stays small; a multiple of a group."""


def noise(x: Tensor, first: int) -> Tensor:
    """A number from 0 to 1 for each float32 value, from its bits and its position, which is counted from `first`."""
    place = torch.arange(first, first + x.numel(), dtype=torch.int64, device=x.device)
    mixed = x.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF).mul_(0x9E3779B1).add_(place.mul_(0x85EBCA6B))
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = mixed.bitwise_and_(0xFFFFFFFF)
        mixed = mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    mixed = mixed.bitwise_and_(0xFFFFFFFF)
    mixed.bitwise_xor_(mixed >> 15)
    return (mixed >> 8).to(torch.float32).mul_(2.0**-24)


def _magnitude_up(x: Tensor) -> Tensor:
    """Float32 values rounded to bfloat16, away from zero."""
    return (x.view(torch.int32) + 0xFFFF).bitwise_and_(~0xFFFF).view(torch.float32)


def _magnitude_down(x: Tensor) -> Tensor:
    return x.view(torch.int32).bitwise_and(~0xFFFF).view(torch.float32)


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and the groups' least values and steps, of a flat tensor."""
    codes = torch.empty(groups_of(x.numel()) * GROUP * bits // 8, dtype=torch.uint8, device=x.device)
    ranges = torch.empty(groups_of(x.numel()), 2, dtype=torch.bfloat16, device=x.device)
    if x.is_cuda:
        from shardwise.model.kernels.group_bits import pack_groups

        pack_groups(x, codes, ranges, bits, GROUP)
        return codes, ranges
    for first in range(0, x.numel(), AT_ONCE):
        some = x[first : first + AT_ONCE].to(torch.float32)
        whole = pad(some, (0, groups_of(some.numel()) * GROUP - some.numel()))
        groups = whole.view(-1, GROUP)
        least = groups.amin(1)
        least = torch.where(least < 0, _magnitude_up(least), _magnitude_down(least))
        step = _magnitude_up((groups.amax(1) - least) / (2**bits - 1))
        own = slice(first // GROUP, first // GROUP + len(groups))
        ranges[own, 0], ranges[own, 1] = least, step
        scaled = (groups - least[:, None]) / torch.where(step > 0, step, 1.0)[:, None]
        code = (scaled + noise(whole, first).view_as(groups)).floor_().clamp_(0, 2**bits - 1).to(torch.uint8)
        each = 8 // bits
        parts = code.view(-1, each)
        joined = parts[:, 0]
        for n in range(1, each):
            joined = joined | (parts[:, n] << (n * bits))
        codes[first // each : first // each + len(joined)] = joined
    return codes, ranges


def dequantize(codes: Tensor, ranges: Tensor, *, bits: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The flat tensor that was quantized, approximately."""
    if codes.is_cuda:
        from shardwise.model.kernels.group_bits import unpack_groups

        return unpack_groups(codes, ranges, bits, GROUP, numel, dtype)
    out, each = torch.empty(numel, dtype=dtype, device=codes.device), 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    for first in range(0, numel, AT_ONCE):
        count = min(AT_ONCE, numel - first)
        joined = codes[first // each : (first + groups_of(count) * GROUP) // each]
        code = ((joined[:, None] >> shifts) & (2**bits - 1)).view(-1, GROUP)
        own = ranges[first // GROUP : first // GROUP + len(code)].to(torch.float32)
        values = code.to(torch.float32) * own[:, 1:] + own[:, :1]
        out[first : first + count] = values.view(-1)[:count]
    return out


def quantized_in(bits: int) -> Callable[[Tensor], tuple[tuple[Tensor, ...], Callable[..., Tensor]]]:
    """A form for `saving.py`: flat tensors are kept in this many bits."""

    def form(x: Tensor) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
        return quantize(x, bits), partial(dequantize, bits=bits, numel=x.numel(), dtype=x.dtype)

    return form
