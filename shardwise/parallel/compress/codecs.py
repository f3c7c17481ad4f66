"""Blocks of values in 8, 4 or 1 bits with a scale each: encoded to bytes and decoded.

Rounding is to nearest. The largest value of a block sets the scale of int8, int4 and fp8 (E4M3); the scale of signs is the mean
magnitude, the closest approximation by two values of equal size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Codec(NamedTuple):
    """An encoding of values, [blocks, values of a block], as bytes."""

    scales: Callable[[Tensor, Tensor], Tensor]
    """The scale of each block, from its values and the number of them that are not padding; float32, [blocks, 1]."""
    encode: Callable[[Tensor, Tensor], Tensor]
    """Values and scales to codes, [blocks, bytes]."""
    decode: Callable[[Tensor, torch.dtype], Tensor]
    """Codes to multiples of the scale."""


def to_bytes(codec: Codec, values: Tensor, counts: Tensor) -> Tensor:
    """Blocks as bytes on the wire: the codes, then the scale. `counts` is the number of values per block that are not padding."""
    scales = codec.scales(values, counts)
    return torch.cat((codec.encode(values, scales), scales.view(torch.uint8)), dim=1)


def from_bytes(codec: Codec, sent: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks that such bytes encode."""
    scales = sent[:, -4:].contiguous().view(torch.float32)
    return codec.decode(sent[:, :-4], dtype).mul_(scales.to(dtype))


def _by_largest(most: float) -> Callable[[Tensor, Tensor], Tensor]:
    def scales(values: Tensor, counts: Tensor) -> Tensor:
        return (values.abs().amax(dim=1, keepdim=True) / most).float()

    return scales


def _mean_magnitude(values: Tensor, counts: Tensor) -> Tensor:
    total = values.abs().sum(dim=1, keepdim=True)
    return (total / counts[:, None].clamp(min=1).to(values.dtype)).float()


def _in_scale(values: Tensor, scales: Tensor) -> Tensor:
    """Values divided by their scale; a block of zeros has the scale 0. They exceed the largest code by rounding at most."""
    scales = scales.to(values.dtype)
    return values / torch.where(scales > 0, scales, 1.0)


def _encode_int8(values: Tensor, scales: Tensor) -> Tensor:
    return _in_scale(values, scales).round_().to(torch.int8).view(torch.uint8)


def _decode_int8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.contiguous().view(torch.int8).to(dtype)


def _encode_fp8(values: Tensor, scales: Tensor) -> Tensor:
    # Via float32, whatever dtype the gradients have: PyTorch has no direct conversion from float64 that rounds once.
    return _in_scale(values, scales).clamp_(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)


def _decode_fp8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(dtype)


def _encode_int4(values: Tensor, scales: Tensor) -> Tensor:
    """Two values per byte, the first half of a block in the low bits: no strided access."""
    low, high = _in_scale(values, scales).round_().add_(8).to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def _decode_int4(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat((codes & 15, codes >> 4), dim=1).to(dtype).sub_(8)


def _encode_signs(values: Tensor, scales: Tensor) -> Tensor:
    """Eight bytes of 0 or 1 are packed as one number: the product moves the lowest bit of byte k to bit 56 + k."""
    bytes_of_bits = (values >= 0).view(torch.int64)
    return (bytes_of_bits * sum(1 << (56 - 7 * k) for k in range(8)) >> 56).to(torch.uint8)


def _decode_signs(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Eight signs of a code, looked up as one number."""
    bits = torch.arange(256, device=codes.device)[:, None] >> torch.arange(8, device=codes.device)
    table = ((bits & 1) * 2 - 1).to(torch.int8).view(torch.int64).view(-1)
    signs = table.index_select(0, codes.reshape(-1).to(torch.int32))
    return signs.view(torch.int8).view(len(codes), -1).to(dtype)


CODECS = {
    "int8": Codec(_by_largest(127), _encode_int8, _decode_int8),
    "fp8": Codec(_by_largest(448), _encode_fp8, _decode_fp8),
    "int4": Codec(_by_largest(7), _encode_int4, _decode_int4),
    "onebit": Codec(_mean_magnitude, _encode_signs, _decode_signs),
}
"""By method."""
