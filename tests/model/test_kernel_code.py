"""What Triton makes of kernels that move rows, read from their code for a GPU, which needs no GPU: rows are loaded and stored 16
bytes at a time. A mask that the compiler cannot follow makes it one element at a time, and the kernel several times slower."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

K, WIDTH = 2, 1024
ROWS, INDICES = "*bf16", "*i32"


def accesses(kernel: Any, **arguments: Any) -> Counter[str]:
    """How often the code of a kernel has each width of a load or store of global memory. Arguments are a pointer's type or a
    constant."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    types = {name: value if isinstance(value, str) else "constexpr" for name, value in arguments.items()}
    constants = {name: value for name, value in arguments.items() if not isinstance(value, str)}
    aligned = {(n,): [["tt.divisibility", 16]] for n, given in enumerate(types.values()) if given != "constexpr"}
    source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    return Counter(re.findall(r"(?:ld|st)\.global[\w.:]*", made.asm["ptx"]))


def test_rows_go_to_their_experts_16_bytes_at_a_time() -> None:
    pytest.importorskip("triton")
    from shardwise.model.kernels import moe as kernels

    shape = dict(K=K, WIDTH=WIDTH, BLOCK=WIDTH)
    spread = accesses(kernels._spread, x=ROWS, places=INDICES, rows=ROWS, **shape)
    assert spread["st.global.v4.b32"]
    assert not spread["st.global.b16"] + spread["ld.global.b16"]
    collect = accesses(
        kernels._collect, rows=ROWS, places=INDICES, weights=ROWS, out=ROWS, K=K, WEIGHED=True, WIDTH=WIDTH, BLOCK=WIDTH
    )
    assert collect["ld.global.v4.b32"]
    assert collect["ld.global.b16"] <= K  # a weight for each choice
    backward = accesses(
        kernels._combine_weighted_backward, gradient=ROWS, rows=ROWS, places=INDICES, weights=ROWS, to_rows=ROWS, to_weights=ROWS,
        **shape,
    )  # fmt: skip
    assert backward["st.global.v4.b32"]
    assert max(backward["ld.global.b16"], backward["st.global.b16"]) <= K
