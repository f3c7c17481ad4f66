"""FLOPs of attention, by the query-key pairs that attend: for each pair two products of a head's width forward and four backward,
whatever kernel computes them.

A fused kernel's backward pass computes the first product again; no gradient needs it, so it counts as recomputation. If the mask is
a tensor, its pairs are counted on its device, and read when the profile ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import argument_names


def causal_pairs(queries: int, keys: int) -> float:
    """Query i sees keys 0 to i, as with PyTorch's `is_causal`."""
    seen = min(queries, keys)
    return seen * (seen + 1) / 2 + (queries - seen) * keys


def pairs_of(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Any:
    """Pairs over all rows and heads: a number, or a tensor with one element."""
    queries, keys = q.shape[-2], k.shape[-2]
    each = q.numel() // max(1, queries * q.shape[-1])
    if mask is None:
        return each * (causal_pairs(queries, keys) if causal else float(queries * keys))
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen.sum(dtype=torch.float64) * (each * queries * keys / max(1, mask.numel()))


def sdpa_flops(given: dict[str, Any]) -> Any:
    """Forward FLOPs of `scaled_dot_product_attention` and of its kernels: rows, heads, sequence, width."""
    q, k, v = (given[name] for name in NAMES[:3])
    mask = given.get("attn_mask", given.get("attn_bias"))
    return pairs_of(q, k, mask, bool(given.get("is_causal"))) * (2.0 * (q.shape[-1] + v.shape[-1]))


def varlen_flops(given: dict[str, Any]) -> Any:
    """The same for packed rows of different lengths (`torch.nn.attention.varlen`): tokens, heads, width."""
    q, k, v = (given[name] for name in NAMES[:3])
    width, causal = 2.0 * q.shape[-2] * (q.shape[-1] + v.shape[-1]), bool(given.get("is_causal"))
    ends_q, ends_k = given.get("cum_seq_q"), given.get("cum_seq_k")
    if ends_q is None or ends_k is None:
        rows, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        return width * rows * (causal_pairs(queries, keys) if causal else float(queries * keys))
    queries, seen = ends_q.diff().double(), ends_k.diff().double()
    if not causal:
        return (queries * seen).sum() * width
    window = given.get("window_size_left")

    def pairs(length: Tensor) -> Tensor:
        """Pairs of a row with as many queries as keys."""
        most = length if window is None or window < 0 else length.clamp(max=window + 1)
        return most * (most + 1) / 2 + most * (length - most)

    # The last query is aligned with the last key: fewer queries than keys are the last rows of a square.
    return (pairs(seen) - pairs((seen - queries).clamp(min=0))).sum() * width


NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The argument names of `scaled_dot_product_attention`."""


@cache
def kernel_of(operator: Any) -> tuple[Callable[[dict[str, Any]], Any], bool] | None:
    """For a fused kernel: a function from its named arguments to its forward FLOPs, and whether it is a backward kernel."""
    name = operator.name().partition(".")[0]
    if not name.startswith(("aten::_scaled_dot_product_", "aten::_flash_attention_")) or name.endswith("_math"):
        return None
    return (varlen_flops if name.startswith("aten::_flash") else sdpa_flops), name.endswith("_backward")


def bound(operator: Any, args: tuple[Any, ...], keys: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the operator's own names."""
    return dict(zip(argument_names(operator), args, strict=False)) | keys


def recomputed_scores(flops: Any, q: Tensor, v: Tensor) -> Any:
    """The part of the forward FLOPs that a fused kernel's backward pass repeats: the product of queries and keys."""
    return flops * (q.shape[-1] / (q.shape[-1] + v.shape[-1]))
