"""Products: near what was measured, never faster than the chip, slower for more work, the same for arrays as for numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.hardware import CHIPS, alignment, find_chip, gemm_seconds, grouped_gemm_seconds
from shardwise.hardware.chips import ITEM_BYTES
from shardwise.hardware.gemm import held_clock

# m, n, k and microseconds in bfloat16, from AIConfigurator's operator database.
MEASURED = {
    "a100-sxm-80g": [
        (8192, 8192, 8192, 4189),
        (4096, 4096, 4096, 514.1),
        (2048, 12288, 4096, 816.3),
        (1024, 5120, 5120, 254.3),
        (128, 4096, 4096, 37.3),
        (1, 4096, 4096, 26.2),
    ],
    "h100-sxm": [
        (8192, 8192, 8192, 1405),
        (4096, 4096, 4096, 174.3),
        (2048, 12288, 4096, 260.2),
        (1024, 5120, 5120, 69.8),
        (128, 4096, 4096, 16.1),
        (1, 4096, 4096, 16.6),
    ],
    "h200-sxm": [
        (8192, 8192, 8192, 1364),
        (4096, 4096, 4096, 175.5),
        (2048, 12288, 4096, 258.8),
        (1024, 5120, 5120, 70.2),
        (128, 4096, 4096, 14.7),
        (1, 4096, 4096, 13.3),
    ],
}
# The same in fp8 and by groups, by PyTorch 2.11 on one H200.
H200_FP8 = [(8192, 8192, 8192, 744.8), (4096, 4096, 4096, 99.1), (8192, 6144, 4096, 287.0), (1024, 4096, 4096, 25.4)]
H200_GROUPED = [(8, 16384, 4096, 2048, 369.3), (32, 65536, 2048, 4096, 1448), (64, 65536, 14336, 4096, 11176)]

DTYPED = [(name, dtype) for name, chip in CHIPS.items() for dtype in chip.peak]
sizes = st.integers(1, 20_000)


@pytest.mark.parametrize("name", MEASURED)
def test_products_take_the_time_measured(name: str) -> None:
    m, n, k, micro = np.array(MEASURED[name]).T
    off = np.abs(gemm_seconds(CHIPS[name], m, n, k) * 1e6 / micro - 1)
    assert off.max() < 0.13
    assert off[:4].max() < 0.09


def test_narrow_and_grouped_products_take_the_time_measured() -> None:
    m, n, k, micro = np.array(H200_FP8).T
    assert np.abs(gemm_seconds(CHIPS["h200-sxm"], m, n, k, "fp8") * 1e6 / micro - 1).max() < 0.2
    experts, tokens, n, k, micro = np.array(H200_GROUPED).T
    assert np.abs(grouped_gemm_seconds(CHIPS["h200-sxm"], tokens, n, k, experts) * 1e6 / micro - 1).max() < 0.15


@given(st.sampled_from(DTYPED), sizes, sizes, sizes, st.integers(1, 64))
@settings(max_examples=150, deadline=None)
def test_never_faster_than_peak_or_memory(case: tuple[str, str], m: int, n: int, k: int, count: int) -> None:
    chip, dtype = CHIPS[case[0]], case[1]
    seconds = gemm_seconds(chip, m, n, k, dtype, count)
    item = ITEM_BYTES[dtype]
    assert seconds >= 2 * m * n * k * count / chip.peak[dtype]
    assert seconds >= count * (item * k * (m + n) + max(item, 2) * m * n) / chip.hbm


@given(st.sampled_from(DTYPED), sizes, sizes, sizes, st.integers(1, 64), st.sampled_from("mnkc"), st.integers(1, 9999))
@settings(max_examples=150, deadline=None)
def test_more_work_is_never_faster(
    case: tuple[str, str], m: int, n: int, k: int, count: int, grown: str, more: int
) -> None:
    chip, dtype = CHIPS[case[0]], case[1]
    small = gemm_seconds(chip, m, n, k, dtype, count)
    m, n, k, count = (v + more * (name == grown) for name, v in zip("mnkc", (m, n, k, count), strict=True))
    assert gemm_seconds(chip, m, n, k, dtype, count) >= small * (1 - 1e-12)


def test_arrays_give_what_numbers_give() -> None:
    rng = np.random.default_rng(0)
    m, n, k, count = rng.integers(1, 9000, (4, 15))
    chip = CHIPS["h100-sxm"]
    together = gemm_seconds(chip, m[:, None], n, k, count=count)
    assert together.shape == (15, 15)
    each = [
        [gemm_seconds(chip, int(a), int(b), int(c), count=int(d)) for b, c, d in zip(n, k, count, strict=True)]
        for a in m
    ]
    np.testing.assert_allclose(together, each, rtol=1e-12)
    assert isinstance(gemm_seconds(chip, 64, 64, 64), float)


def test_a_slower_clock_slows_large_products_only() -> None:
    chip = CHIPS["h100-sxm"]
    assert gemm_seconds(chip, 8192, 8192, 8192, sustained=0.8) == pytest.approx(
        gemm_seconds(chip, 8192, 8192, 8192) / 0.8, rel=0.01
    )
    assert gemm_seconds(chip, 1, 8192, 8192, sustained=0.8) < 1.03 * gemm_seconds(chip, 1, 8192, 8192)
    capped = chip.altered(power_w=500)
    assert gemm_seconds(capped, 8192, 8192, 8192) > 1.1 * gemm_seconds(chip, 8192, 8192, 8192)


def test_groups_cost_at_least_as_much_as_one_product() -> None:
    chip = CHIPS["b200"]
    one = gemm_seconds(chip, 65536, 4096, 7168)
    times = grouped_gemm_seconds(chip, 65536, 4096, 7168, np.array([1, 8, 32, 256]))
    assert times[0] >= one
    assert (np.diff(times) >= 0).all()


def test_widths_that_do_not_align_cost_what_was_measured() -> None:
    assert alignment(4096, 14336) == 1.0
    assert alignment(1800) == pytest.approx(0.93)
    assert alignment(108) < 0.5 < alignment(112)
    assert alignment(4096, 7201) < alignment(4096, 7204)
    assert alignment(np.array([128, 108])).tolist() == [alignment(128), alignment(108)]


def test_parts_with_more_power_for_an_operation_hold_their_clock() -> None:
    clocks = [held_clock(find_chip(name)) for name in ("b200", "gb200", "gb300")]
    assert clocks[0] == 1.0
    assert clocks == sorted(clocks)
    assert held_clock(find_chip("v100")) == 1.0  # borrows from another generation


@pytest.mark.parametrize("shape", [(0, 128, 64), (128, 0, 64), (128, 128, 0), (0, 0, 0)])
def test_an_empty_product_takes_no_longer_than_a_small_one(shape: tuple[int, int, int]) -> None:
    chip = find_chip("h100")
    with np.errstate(all="raise"):
        empty = gemm_seconds(chip, *shape)
        several = gemm_seconds(
            chip, np.array([shape[0], 128.0]), np.array([shape[1], 128.0]), np.array([shape[2], 64.0])
        )
    small = gemm_seconds(chip, 128, 128, 64)
    assert 0 < empty <= small
    assert several.tolist() == pytest.approx([empty, small])
