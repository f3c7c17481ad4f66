"""What Triton makes of kernels that move rows, read from their code for a GPU, which needs no GPU: rows are loaded and stored 16
bytes at a time. A mask that the compiler cannot follow makes it one element at a time, and the kernel several times slower."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

K, WIDTH = 2, 1024
ROWS, INDICES = "*bf16", "*i32"


def code(kernel: Any, warps: int = 2, **arguments: Any) -> str:
    """The code of a kernel. Arguments are a type, types in a tuple, or a constant."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    types = {name: value if isinstance(value, str | tuple) else "constexpr" for name, value in arguments.items()}
    constants = {name: value for name, value in arguments.items() if not isinstance(value, str | tuple)}
    places = [((n,), given) for n, given in enumerate(types.values()) if isinstance(given, str)]
    places += [
        ((n, m), each)
        for n, given in enumerate(types.values())
        if isinstance(given, tuple)
        for m, each in enumerate(given)
    ]
    aligned = {place: [["tt.divisibility", 16]] for place, given in places if given[0] in "*i"}
    source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 2})
    return str(made.asm["ptx"])


def accesses(kernel: Any, **arguments: Any) -> Counter[str]:
    """How often the code of a kernel has each width of a load or store of global memory."""
    return Counter(re.findall(r"(?:ld|st)\.global[\w.:]*", code(kernel, **arguments)))


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


@pytest.mark.parametrize("adds", [False, True])
def test_many_tensors_are_cast_16_bytes_at_a_time(adds: bool) -> None:
    pytest.importorskip("triton")
    from shardwise.model.kernels.many import AT_ONCE, _cast

    tensors, numbers = (("*bf16",) * 3, ("*fp32",) * 3), ("i32",) * 3
    for sources, targets in (tensors, tensors[::-1]):
        found = accesses(_cast, SOURCES=sources, TARGETS=targets, SIZES=numbers, ADDS=adds, N=AT_ONCE)
        assert found["ld.global.v4.b32"] >= 3
        assert found["st.global.v4.b32"] >= 3
        assert found.keys() == {"ld.global.v4.b32", "st.global.v4.b32"}


def test_matrices_are_transposed_16_bytes_at_a_time() -> None:
    pytest.importorskip("triton")
    from shardwise.model.kernels import quantize

    fp8, sizes = dict(x="*fp8e4nv", scale="*fp32", amax="*i32"), dict(rows="i32", columns="i32")
    tile = dict(HEIGHT=quantize.SIDE, WIDTH=quantize.SIDE, warps=quantize.SIDE_WARPS)
    found = accesses(quantize._transpose, **fp8, out="*fp8e4nv", out_scale="*fp32", **sizes, TOP=8, **tile)
    assert found["st.global.v4.b32"]
    assert found["st.global.b8"] == found["ld.global.b8"] == 0
    assert accesses(quantize._column_amax, **fp8, **sizes, turns="i32", **tile)["ld.global.v4.b32"]


@pytest.mark.parametrize("name", ["_bounded_attention", "_attention_backward_q", "_attention_backward_kv"])
def test_tiles_of_attention_are_loaded_ahead(name: str) -> None:
    """A condition around the loads of a tile would keep the compiler from that, and make a kernel several times slower."""
    pytest.importorskip("triton")
    from shardwise.model.kernels.attention import bounded

    kernel = getattr(bounded, name)
    wide = dict.fromkeys(("OUT", "LSE", "DELTA", "DQ", "DK", "DV_OUT"), "*fp32")
    known = dict.fromkeys(("Q", "K", "V", "GRAD"), ROWS) | wide | dict.fromkeys(("LOW", "PLACE", "KEY_PLACE"), INDICES)
    shape = dict(HEADS=8, GROUPS=2, WIDTH=128, V_WIDTH=128, D=128, DV=128, M=64, N=64, scale="fp32")
    given = {argument: (known | shape).get(argument, "i32") for argument in kernel.arg_names}
    assert "cp.async.cg" in code(kernel, warps=4, **given)
