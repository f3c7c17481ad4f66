"""Saved tensors in few bits (`parallel/activations/quantized.py`) or off the device: what trainer and plan must agree on. No
torch."""

from __future__ import annotations

GROUP = 64
"""Values that share a minimum and a step size."""
RANGE = 4
"""Bytes of a group's minimum and step size, in bfloat16."""
QUANTIZED = ("attention_norm", "middle", "ffn_norm", "gate", "up", "function", "inner")
"""Tensors of a dense layer that are quantized (named in `plan/cost/rematerialization.py`): those saved by norms, matrices and the
activation function. Queries, keys, values and the attention output stay as they are: the backward pass recomputes probabilities
from them, and these do not tolerate the error."""
BEFORE_EXPERTS = ("attention_norm", "middle")
"""The tensors of an MoE layer that are quantized."""


ELSEWHERE = "host "
"""Prefix of a tensor's name in a layer's recomputation list if the tensor is swapped to host memory or disk."""


def swappable_tensors(quantized: frozenset[str], *, attention: str, context: int) -> frozenset[str]:
    """The tensors of a layer that may be swapped out: those that may be quantized, and attention's."""
    return quantized | {"heads", "attended"} if attention != "latent" and context == 1 else quantized


def groups_of(numel: int) -> int:
    """The number of groups of a tensor, padded."""
    return -(-numel // GROUP)


def quantized_bytes(numel: int, bits: int) -> int:
    """Bytes of a quantized tensor."""
    return groups_of(numel) * (GROUP * bits // 8 + RANGE)


def quantized_tensors(*, routed: bool, parallel_block: bool, gated: bool, activation: str) -> frozenset[str]:
    """The tensors of a layer that are quantized. ReLU and its square save their own output, which another operation saves too."""
    words = set(BEFORE_EXPERTS if routed else QUANTIZED)
    if parallel_block:
        words -= {"middle", "ffn_norm"}
    if not gated:
        words -= {"gate", "function"} if activation in ("gelu", "gelu_erf") else {"gate", "up", "function", "inner"}
    return frozenset(words)
