"""Blocks of values in 8, 4 or 1 bits with a scale each: encoded to bytes and decoded.

Rounding is to nearest. The largest value of a block sets the scale of int8, int4 and fp8 (E4M3); the scale of signs is the mean
magnitude, the closest approximation by two values of equal size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.run.compression import BLOCK


class Codec(NamedTuple):
    """An encoding of values, [blocks, BLOCK], as bytes."""

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
    return codec.decode(sent[:, :-4], dtype) * scales.to(dtype)


def _by_largest(most: float) -> Callable[[Tensor, Tensor], Tensor]:
    def scales(values: Tensor, counts: Tensor) -> Tensor:
        return (values.abs().amax(dim=1, keepdim=True) / most).float()

    return scales


def _mean_magnitude(values: Tensor, counts: Tensor) -> Tensor:
    return (values.abs().sum(dim=1, keepdim=True) / counts[:, None].clamp(min=1).to(values.dtype)).float()


def _in_scale(values: Tensor, scales: Tensor, most: float) -> Tensor:
    """Values divided by their scale. A block of zeros has the scale 0."""
    scales = scales.to(values.dtype)
    return (values / torch.where(scales > 0, scales, 1.0)).clamp(-most, most)


def _encode_int8(values: Tensor, scales: Tensor) -> Tensor:
    return _in_scale(values, scales, 127).round().to(torch.int8).view(torch.uint8)


def _decode_int8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.contiguous().view(torch.int8).to(dtype)


def _encode_fp8(values: Tensor, scales: Tensor) -> Tensor:
    # Via float32, whatever dtype the gradients have: PyTorch has no direct conversion from float64 that rounds once.
    return _in_scale(values, scales, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)


def _decode_fp8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(dtype)


def _encode_int4(values: Tensor, scales: Tensor) -> Tensor:
    """Two values per byte, the first half of a block in the low bits: no strided access."""
    codes = (_in_scale(values, scales, 7).round().to(torch.int8) + 8).view(torch.uint8)
    return codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)


def _decode_int4(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat((codes & 15, codes >> 4), dim=1).to(dtype) - 8


def _weights(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def _encode_signs(values: Tensor, scales: Tensor) -> Tensor:
    bits = (values >= 0).view(len(values), BLOCK // 8, 8)
    return (bits.to(torch.uint8) * _weights(values.device)).sum(dim=2, dtype=torch.uint8)


def _decode_signs(codes: Tensor, dtype: torch.dtype) -> Tensor:
    bits = (codes[:, :, None] & _weights(codes.device)) > 0
    return bits.view(len(codes), BLOCK).to(dtype) * 2 - 1


CODECS = {
    "int8": Codec(_by_largest(127), _encode_int8, _decode_int8),
    "fp8": Codec(_by_largest(448), _encode_fp8, _decode_fp8),
    "int4": Codec(_by_largest(7), _encode_int4, _decode_int4),
    "onebit": Codec(_mean_magnitude, _encode_signs, _decode_signs),
}
"""By method."""
