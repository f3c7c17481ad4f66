"""FLOPs of the GEMMs, convolutions and attention of a profile, from the recorded shapes.

Only operators that do the work themselves are counted, not their callers; of two nested counted operators, the outer. A
multiply-add is two FLOPs. Attention is counted in full, even if a causal kernel skips half, since shapes do not show the mask. Its
backward recomputes the scores, so it is 2.5 times the forward (FlashAttention, Dao et al. 2022). Recompute counts, as in hardware
FLOPs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import Profile
from shardwise.trace.spans.intervals import nest

CONVENTION = "hardware FLOPs of GEMMs, convolutions and attention: full attention, recompute included"

_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
_ATTENTION_BACKWARD = 2.5
_OWN_GEMMS = ("shardwise::gemm", "shardwise::fp8_gemm", "shardwise::product")
"""Prefixes of this project's tuned GEMMs (`model/gemm`); the last is that of version 0.1."""


def flops_of(name: str, shapes: list[Any], values: list[Any]) -> float:
    """FLOPs of one call, 0 for an operator that is not counted or has unexpected inputs."""
    try:
        return _flops(name, shapes, values)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        return 0.0


def _flops(name: str, shapes: list[Any], values: list[Any]) -> float:
    match name:
        case "aten::mm" | "aten::_scaled_mm" | "aten::_int_mm" | "aten::_grouped_mm":
            return _gemm(shapes)
        case "aten::addmm" | "aten::_addmm_activation":
            return _gemm(shapes[1:])
        case "aten::bmm" | "aten::baddbmm":
            (b, m, k), (_, _, n) = shapes[:2] if name == "aten::bmm" else shapes[1:3]
            return 2.0 * b * m * n * k
        case "aten::mv" | "aten::dot" | "aten::vdot":
            return 2.0 * prod(shapes[0])
        case "aten::addmv":
            return 2.0 * prod(shapes[1])
        case "aten::mkldnn_linear" | "mkldnn::_linear_pointwise":
            return 2.0 * prod(shapes[0]) * shapes[1][0]
        case "aten::convolution":
            return _convolution(shapes[1], _output(shapes[0], shapes[1], values))
        case "aten::convolution_backward":
            if len(values) > 7 and values[7] == "True":  # transposed: not counted in the forward either
                return 0.0
            # The gradients of input and weight, as `output_mask` requests; each costs as much as the forward.
            mask = values[-1].strip("[]").split(",")[:2] if values and "[" in str(values[-1]) else ["True", "True"]
            return sum(word.strip() == "True" for word in mask) * _convolution(shapes[2], shapes[0])
        case _ if name.startswith(_OWN_GEMMS):
            return _gemm(shapes)
        case _ if name in _ATTENTION:
            return _attention(*shapes[:3])
        case "aten::_flash_attention_forward":
            return _packed_attention(shapes[0], shapes[2], values[6], values[11:12])
        case "aten::_flash_attention_backward":
            return _ATTENTION_BACKWARD * _packed_attention(shapes[1], shapes[3], values[9], values[15:16])
        case _ if name.removesuffix("_backward") in _ATTENTION or name.endswith("_attention_for_cpu_backward"):
            return _ATTENTION_BACKWARD * _attention(*shapes[1:4])
        case _:
            return 0.0


def _gemm(shapes: list[Any]) -> float:
    """A GEMM, or a grouped GEMM whose rows are divided among several matrices."""
    (m, k), n = shapes[0], shapes[1][-1]
    return 2.0 * m * n * k if len(shapes[1]) > 1 else 0.0


def _convolution(weight: list[int], output: list[int]) -> float:
    """Each output element is a dot product over the input channels of its group and the kernel's window."""
    return 2.0 * prod(output) * prod(weight[1:])


def _output(input_shape: list[int], weight: list[int], values: list[Any]) -> list[int]:
    """The output shape of a convolution, by stride, padding and dilation; transposed convolutions are not counted."""
    stride, padding, dilation = ([int(n) for n in values[at].strip("[]").split(",")] for at in (3, 4, 5))
    if values[6] != "False":
        return [0]
    spatial = zip(input_shape[2:], weight[2:], stride, padding, dilation, strict=True)
    return [input_shape[0], weight[0], *((n + 2 * pad - d * (k - 1) - 1) // step + 1 for n, k, step, pad, d in spatial)]


def _attention(q: list[int], k: list[int], v: list[int]) -> float:
    """QK^T and PV; shapes are [batch, heads, sequence, head dimension]."""
    batch, heads, queries, width = q
    return 2.0 * batch * heads * queries * k[2] * (width + v[3])


def _packed_attention(q: list[int], v: list[int], max_seqlen: Any, window_left: list[Any]) -> float:
    """Packed sequences, [tokens, heads, head dimension], counted as if all had the maximum length, or the sliding window's."""
    tokens, heads, width = q
    keys = min([int(max_seqlen), *(int(left) + 1 for left in window_left if str(left).isdigit())])
    return 2.0 * tokens * heads * keys * (width + v[2])


def event_flops(profile: Profile) -> tuple[Integers, NDArray[np.float64]]:
    """Counted events, and the FLOPs of each."""
    shapes, events = profile.shapes, profile.events
    if not len(shapes):
        return np.zeros(0, np.int64), np.zeros(0)
    columns = (events.name[shapes.event], shapes.dims, shapes.values)
    counted = np.array([_may_count(name) for name in events.names])[columns[0]]
    event = shapes.event[counted].astype(np.int64)
    lines = np.stack([column[counted] for column in columns], 1).astype(np.int64)
    distinct, which = np.unique(lines, axis=0, return_inverse=True)
    each = np.array([flops_of(events.names[n], shapes.decode(d), shapes.decode(v)) for n, d, v in distinct.tolist()])
    found = each[which.reshape(-1)] if len(event) else np.zeros(0)
    event, found = event[found > 0], found[found > 0]
    outer = nest(events.track[event], events.start[event], events.end[event]).parent < 0
    return event[outer], found[outer]


def _may_count(name: str) -> bool:
    """Whether operators of this name may be counted; shapes of others are not decoded."""
    return name.startswith(_OWN_GEMMS) or (
        name.startswith(("aten::", "mkldnn::"))
        and any(word in name for word in ("mm", "mv", "dot", "linear", "conv", "attention"))
    )
