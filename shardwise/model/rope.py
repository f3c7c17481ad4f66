"""Rotary positions (Su et al. 2021): pairs of elements in a head are rotated by angles that grow with the position.

Frequencies may be stretched for contexts longer than the trained one: Llama 3.1's rule by wavelength, or YaRN (Peng et
al. 2023). Angles are computed in float64 from the positions at each forward pass, so the network keeps no tables that a
device move, a dtype cast or an empty initialisation could spoil.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.model.layers import at_least_float32
from shardwise.run import ModelConfig

Rope = tuple[
    Tensor, Tensor
]  # cosines and sines, [batch, sequence, 1, width]; or the elements that `alibi.py` appends to queries and keys


def yarn_get_mscale(factor: float, weight: float) -> float:
    """YaRN's amplitude for a context stretched `factor` times (Peng et al. 2023, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale_factor(config: ModelConfig) -> float:
    """Factor on the attention scores that DeepSeek's use of YaRN asks for."""
    if config.rope_scaling != "yarn" or config.position != "rotary":
        return 1.0
    return yarn_get_mscale(config.rope_factor, config.yarn_mscale_all) ** 2


def rotated_width(share: float, width: int) -> int:
    """How many elements of a head of this width are rotated."""
    return int(share * width)


def rope_frequencies(config: ModelConfig, device: torch.device | str) -> tuple[Tensor, float]:
    """Radians per position for each pair, and the amplitude of the rotation."""
    width = config.rope_dim if config.attention == "latent" else config.head_dim
    # Pairs that are not rotated come last, with frequency zero. The rotated ones have the frequencies of a head as
    # wide as they are.
    rotated = rotated_width(config.rope_share, width)
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=device) / rotated
    freq = torch.where(exponent < 1, config.rope_theta**-exponent, 0.0)
    if config.rope_scaling == "llama3":
        # The share of the original context that a wavelength fills decides how far it is stretched.
        turns = config.rope_original * freq / (2 * math.pi)
        keep = ((turns - config.rope_low_freq) / (config.rope_high_freq - config.rope_low_freq)).clamp(0, 1)
        return keep * freq + (1 - keep) * freq / config.rope_factor, 1.0
    if config.rope_scaling == "yarn":

        def pair_with(turns: float) -> float:
            length = config.rope_original / (turns * 2 * math.pi)
            return rotated * math.log(length) / (2 * math.log(config.rope_theta))

        low = max(math.floor(pair_with(config.yarn_beta_fast)), 0)
        high = min(math.ceil(pair_with(config.yarn_beta_slow)), rotated - 1)
        pair = torch.arange(width // 2, dtype=torch.float64, device=device)
        stretch = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
        amplitude = yarn_get_mscale(config.rope_factor, config.yarn_mscale)
        amplitude /= yarn_get_mscale(config.rope_factor, config.yarn_mscale_all)
        return stretch * freq / config.rope_factor + (1 - stretch) * freq, amplitude
    return freq, 1.0


def rope_cos_sin(
    config: ModelConfig,
    positions: Tensor,
    dtype: torch.dtype,
    compute: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None,
) -> Rope:
    """Cosines and sines for positions [batch, sequence], shared by all layers of a forward pass. `compute`, if given, applies the
    functions to the angles [batch, sequence, 1, width]."""
    freq, amplitude = rope_frequencies(config, positions.device)
    angles = positions.to(torch.float64)[..., None] * freq
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    if dtype != torch.float64:
        dtype = torch.float32
    cos, sin = (
        function(angles) if compute is None else compute(function, angles) for function in (torch.cos, torch.sin)
    )
    scale: Tensor | float = amplitude
    if amplitude != 1 and config.rope_share < 1:  # elements that are not rotated stay as they are
        scale = torch.where(freq > 0, amplitude, 1.0).repeat(2)
    return (cos * scale).to(dtype), (sin * scale).to(dtype)


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate heads [batch, sequence, heads, width]: the first half of the width pairs with the second."""
    cos, sin = rope
    upcast = at_least_float32(x)
    first, second = upcast.chunk(2, dim=-1)
    return (upcast * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
