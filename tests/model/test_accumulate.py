"""Sums that products make: found in a graph where they may be, left alone elsewhere, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.model.gemm.accumulate import ACCUMULATE, SUMS
from shardwise.model.gemm.tuned import fp8_gemm, gemm
from shardwise.model.quantized.formats import E4M3


def residual(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x + gemm(h.flatten(0, 1), w.mT).view(x.shape)


def both_are_products(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    rows = h.flatten(0, 1)
    return gemm(rows, w.mT).view(x.shape) + gemm(rows, v.mT).view(x.shape)


def three(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    rows = h.flatten(0, 1)
    return (gemm(rows, w.mT) + gemm(rows, v.mT)) + gemm(rows, w.mT + v.mT)


def wanted_elsewhere(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    out = gemm(h.flatten(0, 1), w.mT).view(x.shape)
    return (x + out) * out


def to_itself(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    out = gemm(h.flatten(0, 1), w.mT)
    return out + out


def of_one_row(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x[:1, :1] + gemm(h.flatten(0, 1), w.mT).view(x.shape)


def a_number(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return gemm(h.flatten(0, 1), w.mT) + 1


def a_part(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.add(x, gemm(h.flatten(0, 1), w.mT).view(x.shape), alpha=0.5)


def turned(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x.mT + gemm(h.flatten(0, 1), w.mT).view(x.shape).mT


def for_each_of_a_batch(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x + gemm(h[0], w.mT)


def wider(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x.double() + gemm(h.flatten(0, 1), w.mT).view(x.shape)


def eight_bits(x: Tensor, h: Tensor, w: Tensor, v: Tensor) -> Tensor:
    one = torch.ones(())
    rows, first, second = (a.to(E4M3) for a in (h.flatten(0, 1), w, v))
    made = [fp8_gemm(rows, matrix.t(), one, one, torch.float32, True) for matrix in (first, second)]
    return x + (made[0].view(x.shape) + made[1].view(x.shape))


@pytest.mark.parametrize(
    ("function", "sums", "left"),
    [
        (residual, 1, 0),
        (both_are_products, 1, 1),
        (three, 2, 1),
        (eight_bits, 1, 1),
        (wanted_elsewhere, 0, 1),
        (to_itself, 0, 1),
        (of_one_row, 0, 1),
        (a_number, 0, 1),
        (a_part, 0, 1),
        (turned, 0, 1),
        (for_each_of_a_batch, 0, 1),
        (wider, 0, 1),
    ],
)
def test_sums_are_made_by_products(function: Callable[..., Tensor], sums: int, left: int) -> None:
    torch.manual_seed(0)
    x, h, w, v = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.randn(8, 4), torch.randn(8, 4)
    wanted = function(x, h, w, v)
    traced: Any = make_fx(function, tracing_mode="fake")(x, h, w, v)
    ACCUMULATE(traced.graph)
    traced.recompile()
    targets = [node.target for node in traced.graph.nodes]
    assert sum(target in SUMS.values() for target in targets) == sums
    assert sum(target in SUMS for target in targets) == left
    torch.testing.assert_close(traced(x, h, w, v), wanted)


@pytest.mark.drawn(group="compiled")
def test_sizes_that_may_change_are_left_alone() -> None:
    x, h, w = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.randn(8, 4)
    traced: Any = make_fx(residual, tracing_mode="symbolic")(x, h, w, w)
    ACCUMULATE(traced.graph)
    assert torch.ops.shardwise.gemm_onto.default not in [node.target for node in traced.graph.nodes]
