"""Saved tensors in few bits, or elsewhere: what both the trainer (`parallel/packed.py`) and its plan must know. No torch."""

from __future__ import annotations

GROUP = 256
"""Values that share a least one and a step."""
RANGE = 8
"""Bytes of those two."""
PACKED = ("attention_norm", "middle", "ffn_norm", "gate", "up", "function", "inner")
"""Tensors of a dense layer that are packed (`plan/cost/kept.py` has their names): what norms, matrices and the function between
them save. Queries, keys, values and what attention makes of them stay as they are: its backward pass makes probabilities of them
again, and these do not bear it."""
BEFORE_EXPERTS = ("attention_norm", "middle")
"""Of those, what is packed of an MoE layer."""


ELSEWHERE = "host "
"""Before the name of a tensor that waits in the host's memory or on its disk, among what is recomputed of a layer."""


def swapped_words(packed: frozenset[str], *, attention: str, context: int) -> frozenset[str]:
    """The tensors of a layer that may leave the device: those that may be packed, and attention's."""
    return packed | {"heads", "attended"} if attention != "latent" and context == 1 else packed


def groups_of(numel: int) -> int:
    """Groups that a tensor is padded to."""
    return -(-numel // GROUP)


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of a packed tensor."""
    return groups_of(numel) * (GROUP * bits // 8 + RANGE)


def packed_words(*, routed: bool, parallel_block: bool, gated: bool, activation: str) -> frozenset[str]:
    """The tensors of a layer that are packed. ReLU and its square save their own result, which is another tensor's too."""
    words = set(BEFORE_EXPERTS if routed else PACKED)
    if parallel_block:
        words -= {"middle", "ffn_norm"}
    if not gated:
        words -= {"gate", "function"} if activation == "gelu" else {"gate", "up", "function", "inner"}
    return frozenset(words)
