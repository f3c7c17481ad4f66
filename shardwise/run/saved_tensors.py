"""Saved tensors in few bits (`parallel/activations/quantized.py`) or elsewhere: what trainer and plan must agree on. No torch."""

from __future__ import annotations

GROUP = 256
"""Values that share a least one and a step."""
RANGE = 8
"""Bytes of those two."""
QUANTIZED = ("attention_norm", "middle", "ffn_norm", "gate", "up", "function", "inner")
"""Tensors of a dense layer that are quantized (named in `plan/cost/rematerialization.py`): what norms, matrices and the
function between them save. Queries, keys, values and what attention makes of them stay as they are: its backward pass recomputes
probabilities from them, and these do not bear it."""
BEFORE_EXPERTS = ("attention_norm", "middle")
"""Of those, what is quantized of an MoE layer."""


ELSEWHERE = "host "
"""Before the name of a tensor that waits in the host's memory or on its disk, among what is recomputed of a layer."""


def swappable_tensors(quantized: frozenset[str], *, attention: str, context: int) -> frozenset[str]:
    """The tensors of a layer that may leave the device: those that may be quantized, and attention's."""
    return quantized | {"heads", "attended"} if attention != "latent" and context == 1 else quantized


def groups_of(numel: int) -> int:
    """Groups that a tensor is padded to."""
    return -(-numel // GROUP)


def quantized_bytes(numel: int, bits: int) -> int:
    """Bytes of a quantized tensor."""
    return groups_of(numel) * (GROUP * bits // 8 + RANGE)


def quantized_tensors(*, routed: bool, parallel_block: bool, gated: bool, activation: str) -> frozenset[str]:
    """The tensors of a layer that are quantized. ReLU and its square save their own result, which is another tensor's too."""
    words = set(BEFORE_EXPERTS if routed else QUANTIZED)
    if parallel_block:
        words -= {"middle", "ffn_norm"}
    if not gated:
        words -= {"gate", "function"} if activation in ("gelu", "gelu_erf") else {"gate", "up", "function", "inner"}
    return frozenset(words)
