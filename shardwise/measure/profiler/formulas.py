"""FLOPs of operators, from the shapes of their arguments: matrix products, convolutions, recurrent layers, attention. A
multiply-add is two.

Elementwise operators, norms, softmax and lookups count nothing, as in every definition of MFU. Operators that are not listed use
the formula registered with `torch.utils.flop_counter.register_flop_formula`; this is how a custom operator, such as a Triton
kernel, is counted.

Attention counts by the query-key pairs that attend: for each pair two products of a head's width forward and four backward,
whatever kernel computes them. A fused kernel's backward pass computes the first product again; no gradient needs it, so it counts
as recomputation. If the mask is a tensor, its pairs are counted on its device, and read when the profile ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.torch_private import argument_names

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
"""Maps arguments, keywords and result to FLOPs: a number, or a one-element tensor if only the device knows it."""


def _product(first: int) -> Formula:
    """A matrix product, batched or not: the operand at position `first` times the next one."""

    def flops(args: tuple[Any, ...], _: dict[str, Any], out: Any) -> float:
        return 2.0 * args[first].numel() * args[first + 1].shape[-1]

    return flops


def _by_columns(args: tuple[Any, ...], _: dict[str, Any], out: Any) -> float:
    """A product with a packed matrix, whose shape is not the matrix's own; the shape of the result is known."""
    return 2.0 * out.numel() * args[0].shape[-1]


def _vector(first: int) -> Formula:
    return lambda args, _, out: 2.0 * args[first].numel()


def _grouped(args: tuple[Any, ...], keys: dict[str, Any], out: Any) -> Any:
    """A product of groups of rows, each with its own matrix. Rows after the end of the last group are not computed."""
    first, second = args[0], args[1]
    ends = keys.get("offs", args[2] if len(args) > 2 else None)
    whole = 2.0 * first.numel() * second.shape[-1]
    if first.dim() == 3 and second.dim() == 3:
        return whole
    if first.dim() == 3:  # columns of the second are grouped
        whole, length = 2.0 * first.shape[1] * first.shape[2] * second.shape[-1], second.shape[-1]
    else:
        length = first.shape[-1] if second.dim() == 2 else first.shape[0]
    return whole if ends is None or not length else ends[-1] * (whole / length)


def _convolution(args: tuple[Any, ...], keys: dict[str, Any], out: Any) -> float:
    """Each output element is a sum over the kernel and its group's channels; if transposed, each input element is spread."""
    x, weight = args[0], args[1]
    transposed = len(args) > 6 and args[6]
    return 2.0 * (x if transposed else out).numel() * prod(weight.shape[1:])


def _convolution_backward(args: tuple[Any, ...], keys: dict[str, Any], out: Any) -> float:
    """The gradients of input and weight each cost the same as the forward pass."""
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    each = 2.0 * (x if transposed else grad).numel() * prod(weight.shape[1:])
    return each * (bool(mask[0]) + bool(mask[1]))


def _recurrent(weights: Callable[[tuple[Any, ...]], Sequence[Tensor]], times: float) -> Formula:
    """Each element of a sequence is multiplied by every matrix of the layers."""

    def flops(args: tuple[Any, ...], _: dict[str, Any], out: Any) -> float:
        elements = args[0].numel() // args[0].shape[-1]
        return times * 2.0 * elements * sum(weight.numel() for weight in weights(args) if weight.dim() == 2)

    return flops


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_int_mm", "aten::_scaled_mm"), _product(0)),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_", "aten::addbmm"), _product(1)),
    **dict.fromkeys(("aten::mv", "aten::dot", "aten::vdot"), _vector(0)),
    **dict.fromkeys(("aten::addmv", "aten::addmv_"), _vector(1)),
    **dict.fromkeys(("aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm", "aten::_cslt_sparse_mm"), _by_columns),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _grouped),
    **dict.fromkeys(("aten::convolution", "aten::_convolution"), _convolution),
    **dict.fromkeys(
        ("aten::cudnn_convolution", "aten::mkldnn_convolution"), lambda args, keys, out: _convolution(args[:2], keys, out)
    ),
    "aten::convolution_backward": _convolution_backward,
    "aten::_cudnn_rnn": _recurrent(lambda args: args[1], 1.0),
    "aten::_cudnn_rnn_backward": _recurrent(lambda args: args[1], 2.0),
    "aten::mkldnn_rnn_layer": _recurrent(lambda args: args[1:3], 1.0),
    "aten::mkldnn_rnn_layer_backward": _recurrent(lambda args: args[1:3], 2.0),
    **{f"shardwise::{name}": _product(0) for name in (
        "router_gemm", "router_grad_input", "router_grad_weight", "scaled_mm_reference", "gemm", "gemm_into", "gemm_onto",
        "fp8_gemm", "fp8_gemm_onto",
    )},
}  # fmt: skip
"""Formulas by the operator's name without its overload."""
OWN = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "inductor")
"""Namespaces whose operators count nothing without a formula; operators of any other are custom, and reported by name."""

WITHOUT = ("aten::_trilinear", "aten::_cdist", "aten::_fft", "aten::linalg_", "aten::_native_multi_head_attention",
           "aten::_transformer_encoder", "aten::_efficient_attention")  # fmt: skip
"""PyTorch's own operators that multiply but are not counted; they are reported by name too."""


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


def formula_of(operator: Any) -> Formula | None:
    """The FLOP formula of an operator; None if it costs nothing, or is not known. A custom operator may register one at any time,
    so its formula is not cached."""
    return _known(operator) if operator.namespace in OWN else _look_up(operator)


def _look_up(operator: Any) -> Formula | None:
    name = operator.name().partition(".")[0]
    if name in FORMULAS:
        return FORMULAS[name]
    registered = flop_registry.get(operator.overloadpacket)
    if registered is None or "attention" in name:
        return None
    return lambda args, keys, out: registered(*args, **keys, out_val=out)


_known = cache(_look_up)


@cache
def is_unknown(operator: Any) -> bool:
    """Whether an operator may compute FLOPs that no formula covers."""
    return operator.namespace not in OWN or operator.name().startswith(WITHOUT)


_COUNTED: dict[int, tuple[Any, bool]] = {}
"""By an operator's id, which is faster to look up than hashing its name. The operator is kept too, so that its id stays unique."""


def is_counted(operator: Any) -> bool:
    """Whether an operator is counted: its FLOPs, or at least its calls."""
    found = _COUNTED.get(id(operator))
    if found is None:
        counted = kernel_of(operator) is not None or formula_of(operator) is not None or is_unknown(operator)
        found = _COUNTED[id(operator)] = operator, counted
    return found[1]
