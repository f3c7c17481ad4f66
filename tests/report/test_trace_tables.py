"""Tables of a profile in a terminal: numbers are never cut, names are, and names that differ stay different."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.report import terminal_trace, trace_view, words
from shardwise.report.terminal import Console
from shardwise.report.trace_view import AxisRow, ModuleRow

LONG = "<class 'torch_package_0.dper3.modules.low_level_modules.single_operators.SomeVeryLongModule'>"


def printed(part: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_names_are_shortened_before_numbers(width: int) -> None:
    passes = {"forward": 0.123, "recompute": 0.0456, "backward": 0.789, "other": 0.0}
    rows = [ModuleRow(f"{LONG}.{at}", 12, passes, 0.123, 9, 0.0) for at in range(3)]
    said = printed(terminal_trace.modules(rows), width)
    for number in ("123 ms", "45.6 ms", "789 ms", "958 ms", "12.3%", "recompute"):
        assert said.count(number) >= 1, said
    assert all(len(line.rstrip()) <= width for line in said.splitlines())
    axes = [AxisRow(f"process group {LONG}", "all_reduce", 8, 1234, 2.0**30, 0.123, 0.0456, 0.5, 3.4e11)]
    said = printed(terminal_trace.communication(axes), width)
    for number in ("1,234", "1.00 GiB", "123 ms", "45.6 ms", "50.0%", "340 GB/s"):
        assert number in said, said


KERNELS = [
    "split_embedding_backward_codegen_rowwise_adagrad_unweighted_exact_warp_per_row_1<float, float, float>(int)",
    "split_embedding_backward_codegen_rowwise_adagrad_unweighted_exact_cta_per_row_1<float, float, float>(int)",
    "split_embedding_backward_codegen_rowwise_adagrad_weighted_exact_warp_per_row_1<float, float, float>(int)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, at::detail::Array<char*, 3> >(int)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>, at::detail::Array<char*, 3> >(int)",
    "void at::native::vectorized_elementwise_kernel<2, at::native::MulFunctor<float>, at::detail::Array<char*, 3> >(int)",
]


def test_kernels_that_differ_look_different() -> None:
    shown = trace_view.short_kernels(KERNELS, 44)
    assert len(set(shown)) == len(KERNELS), shown
    assert all(len(name) <= 44 for name in shown)
    assert not [name for name in shown if "#" in name], shown
    assert trace_view.short_kernels(["gemm", "gemm"], 44) == ["gemm", "gemm"]
    assert all(one[:10] == other[:10] for one, other in pairwise(shown[:3]))


@given(st.lists(st.text("ab<>(): ", max_size=40), max_size=8), st.integers(12, 30))
def test_any_names_stay_distinct(names: list[str], most: int) -> None:
    shown = trace_view.short_kernels(names, most)
    assert all(len(name) <= most for name in shown)
    assert len(set(shown)) == len(set(names))


def test_shortened_in_the_middle() -> None:
    assert words.shortened("abcdefghij", 10) == "abcdefghij"
    assert words.shortened("abcdefghij", 6) == "abc…ij"
    assert len(words.shortened("abcdefghij", 1)) == 1
