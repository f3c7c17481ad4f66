"""FLOPs of operators, from the shapes of their arguments: matrix products, convolutions, recurrent layers. A multiply-add is
two.

Elementwise operators, norms, softmax and lookups count nothing, as in every definition of MFU. Operators that are not listed use
the formula registered with `torch.utils.flop_counter.register_flop_formula`; this is how a custom operator, such as a Triton
kernel, is counted. Attention is counted separately (`attention.py`), by pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.measure.profiler.attention import kernel_of

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


def _recurrent(weights: Callable[[tuple[Any, ...]], Sequence[Tensor]], times: float, x: int = 0) -> Formula:
    """Each element of a sequence is multiplied by every matrix of the layers."""

    def flops(args: tuple[Any, ...], _: dict[str, Any], out: Any) -> float:
        elements = args[x].numel() // args[x].shape[-1]
        return times * 2.0 * elements * sum(weight.numel() for weight in weights(args) if weight.dim() == 2)

    return flops


def _list(at: int) -> Callable[[tuple[Any, ...]], Sequence[Tensor]]:
    return lambda args: args[at]


def _between(first: int, last: int) -> Callable[[tuple[Any, ...]], Sequence[Tensor]]:
    return lambda args: args[first:last]


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
    "aten::_cudnn_rnn": _recurrent(_list(1), 1.0),
    "aten::_cudnn_rnn_backward": _recurrent(_list(1), 2.0),
    "aten::mkldnn_rnn_layer": _recurrent(_between(1, 3), 1.0),
    "aten::mkldnn_rnn_layer_backward": _recurrent(_between(1, 3), 2.0),
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
