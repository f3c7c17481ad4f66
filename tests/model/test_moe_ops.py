"""Experts' kernels and the router's product in parts against plain operations; the operators themselves against PyTorch's rules,
so that a compiler may take them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_kernels import Interpreter

from shardwise.model.moe.ops import has_fused_kernels
from shardwise.model.moe.router_gemm import in_parts, router_gemm


@pytest.mark.drawn(group="kernels")
def test_kernels_do_what_plain_operations_do(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("moe_kernels.py"))


def test_a_cpu_has_the_plain_ones() -> None:
    assert not has_fused_kernels(torch.ones(1))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-80), max_size=20))
def test_three_parts_are_a_float32_to_the_last_bit(numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    parts = in_parts(x)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 3
    assert torch.equal(sum(part.double() for part in parts) + 0.0, x.double() + 0.0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 65), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_routers_product_is_exact_in_float32(tokens: int, experts: int, hidden: int, wide: torch.dtype) -> None:
    torch.manual_seed(tokens * experts * hidden)
    x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    weight = torch.randn(experts, hidden).to(wide).requires_grad_()
    given_back = torch.randn(tokens, experts)
    out = router_gemm(x, weight.mT)
    to_x, to_weight = torch.autograd.grad(out, (x, weight), given_back)
    assert (out.dtype, to_x.dtype, to_weight.dtype) == (torch.float32, torch.bfloat16, wide)
    exact = [
        x.double() @ weight.double().mT,
        given_back.double() @ weight.double(),
        given_back.double().mT @ x.double(),
    ]
    torch.testing.assert_close(out.double(), exact[0], rtol=1e-5, atol=1e-5)
    # Rounded once: no further off than the nearest number of 16 bits, and what float32 loses.
    torch.testing.assert_close(to_x.double(), exact[1], rtol=2.0**-8, atol=1e-3)
    torch.testing.assert_close(to_weight.double(), exact[2], rtol=1e-5 if wide == torch.float32 else 2.0**-8, atol=1e-4)
