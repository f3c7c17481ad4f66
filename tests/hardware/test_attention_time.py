"""Attention: near what was measured and published, bounded by peak and memory, cheaper with fewer heads of keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.hardware import CHIPS, attention_flops, attention_seconds

H200, A100 = CHIPS["h200-sxm"], CHIPS["a100-sxm-80g"]

# kernel, batch, heads, length, width of a head, forward and backward in microseconds; causal, PyTorch 2.11 on one H200.
MEASURED = [
    ("flash2", 8, 32, 4096, 64, 1880, 5838),
    ("flash2", 4, 16, 4096, 128, 904.7, 2697),
    ("flash2", 1, 16, 32768, 128, 12645, 34467),
    ("flash2", 16, 16, 1024, 128, 273.8, 1009),
    ("flash3", 8, 32, 4096, 64, 1238, 3459),
    ("flash3", 4, 16, 4096, 128, 462.9, 1400),
    ("flash3", 1, 16, 32768, 128, 6820, 19220),
    ("flash3", 16, 16, 1024, 128, 148.9, 533),
    ("flash3", 1, 8, 4096, 128, 90.1, 263.4),
    ("flash3", 1, 4, 4096, 128, 54.0, 161.8),
]


@pytest.mark.parametrize(("kernel", "batch", "heads", "length", "width", "forward", "backward"), MEASURED)
def test_attention_takes_the_time_measured(
    kernel: str, batch: int, heads: int, length: int, width: int, forward: float, backward: float
) -> None:
    for direction, micro in (("forward", forward), ("backward", backward)):
        seconds = attention_seconds(H200, batch, heads, length, length, width, kernel=kernel, direction=direction)
        assert seconds * 1e6 == pytest.approx(micro, rel=0.1)


def test_decoding_takes_the_time_measured() -> None:
    """64 sequences of 16384, 32 heads on 8 of keys: 923 µs by cuDNN, 4.65 TB/s."""
    seconds = attention_seconds(H200, 64, 32, 1, 16384, 128, causal=False, kernel="flash3", kv_heads=8)
    assert seconds * 1e6 == pytest.approx(923, rel=0.1)


@pytest.mark.parametrize(
    ("kernel", "direction", "low", "high"),
    [
        ("flash1", "forward", 100, 140),
        ("flash2", "forward", 185, 225),
        ("flash2", "backward", 155, 200),
        ("flash3", "forward", 185, 225),
    ],
)
def test_a100_runs_at_the_published_speed(kernel: str, direction: str, low: float, high: float) -> None:
    """TFLOP/s at width 128 and length 8192, after the figures of the FlashAttention-2 paper."""
    shape = (2, 16, 8192, 8192, 128)
    seconds = attention_seconds(A100, *shape, kernel=kernel, direction=direction)
    assert low < attention_flops(*shape, direction=direction) / seconds / 1e12 < high


shapes = st.tuples(
    *(st.integers(1, most) for most in (32, 64, 8192, 32768)), st.sampled_from([32, 64, 96, 128, 192, 256])
)
kinds = st.tuples(
    st.sampled_from(sorted(CHIPS)),
    st.sampled_from(["flash1", "flash2", "flash3"]),
    st.sampled_from(["forward", "backward"]),
    st.booleans(),
)


def dtype_of(name: str) -> str:
    return "bfloat16" if "bfloat16" in CHIPS[name].peak else "float16"


@given(shapes, kinds)
@settings(max_examples=100, deadline=None)
def test_never_faster_than_peak_or_memory(shape: tuple[int, ...], kind: tuple[str, str, str, bool]) -> None:
    name, kernel, direction, causal = kind
    chip, dtype = CHIPS[name], dtype_of(name)
    batch, heads, queries, keys, width = shape
    seconds = attention_seconds(chip, *shape, causal=causal, kernel=kernel, direction=direction, dtype=dtype)
    assert seconds >= attention_flops(*shape, causal=causal, direction=direction) / chip.peak[dtype]
    assert seconds >= 4 * batch * heads * width * (queries + keys) / chip.hbm


@given(shapes, kinds, st.integers(0, 3), st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_more_work_is_never_faster(
    shape: tuple[int, ...], kind: tuple[str, str, str, bool], grown: int, more: int
) -> None:
    name, kernel, direction, causal = kind
    # With a mask the queries are the last of the keys, so longer keys show them more and more queries hide some.
    options = dict(causal=causal and grown < 2, kernel=kernel, direction=direction, dtype=dtype_of(name))
    larger = tuple(value + more * (i == grown) for i, value in enumerate(shape))
    small = attention_seconds(CHIPS[name], *shape, **options)  # type: ignore[arg-type]
    assert attention_seconds(CHIPS[name], *larger, **options) >= small * (1 - 1e-12)  # type: ignore[arg-type]


def test_a_mask_halves_the_work_of_a_whole_sequence_and_none_of_a_single_query() -> None:
    assert attention_flops(1, 1, 4096, 4096, 64) * 2 == attention_flops(1, 1, 4096, 4096, 64, causal=False)
    assert attention_flops(1, 1, 1, 4096, 64) == pytest.approx(
        attention_flops(1, 1, 1, 4096, 64, causal=False), rel=1e-3
    )
    assert attention_flops(2, 3, 100, 100, 64, 32, causal=False) == 2 * 3 * 100 * 100 * 2 * (64 + 32)


def test_fewer_heads_of_keys_make_decoding_cheaper() -> None:
    times = [attention_seconds(H200, 64, 32, 1, 8192, 128, kernel="flash3", kv_heads=n) for n in (1, 8, 32)]
    assert times[0] < times[1] < times[2]
    assert times[2] == attention_seconds(H200, 64, 32, 1, 8192, 128, kernel="flash3")


def test_arrays_give_what_numbers_give() -> None:
    lengths = np.array([128, 1000, 4096])
    together = attention_seconds(A100, 2, np.array([[4], [32]]), lengths, lengths, 128)
    each = [[attention_seconds(A100, 2, h, int(s), int(s), 128) for s in lengths] for h in (4, 32)]
    np.testing.assert_allclose(together, each, rtol=1e-12)
    assert isinstance(attention_seconds(A100, 1, 1, 1, 1, 64), float)
