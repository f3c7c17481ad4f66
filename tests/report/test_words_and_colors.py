"""Numbers in words and the colours: nothing printed is misleading, nothing drawn is indistinguishable."""

from __future__ import annotations

import math
import re
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.ledger import CATEGORIES, OWNERS, PASSES
from shardwise.report import colors, words
from shardwise.run import counted
from shardwise.run.axes import AXES


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (words.size(71.2 * 2**30), "71.2 GiB"),
        (words.size(12), "12 B"),
        (words.size(63.9), "64 B"),
        (words.size(1023.7), "1.00 KiB"),
        (words.size(2**20 - 1), "1.00 MiB"),
        (words.size(1023.4 * 2**30), "1,023 GiB"),
        (words.slower(0.1), "10.0% slower"),
        (words.slower(-0.25), "25.0% faster"),
        (words.slower(4.641), "5.64 times as long"),
        (words.change(1e-9), "<0.001%"),
        (words.change(-2e-4), "-0.020%"),
        (words.flops(1307.4e12, "FLOP/s"), "1.31 PFLOP/s"),
        (words.price(0), "–"),
        (counted(1, "message"), "1 message"),
        (counted(2, "quantity"), "2 quantities"),
        (counted(3, "microbatch"), "3 microbatches"),
        (words.gib(2**30), "1.00"),
        (words.seconds(0.00431), "4.31 ms"),
        (words.seconds(0.9996), "1.00 s"),
        (words.seconds(119.97), "2.00 min"),
        (words.seconds(1.08e6), "12.5 days"),
        (words.count(16384), "16,384"),
        (words.count(1.2e6), "1.20 M"),
        (words.count(405e9), "405 B"),
        (words.count(999_999), "1.00 M"),
        (words.flops(412e12, "FLOP/s"), "412 TFLOP/s"),
        (words.rate(1.25e6, "tokens"), "1.25 M tokens/s"),
        (words.rate(340e9, "B"), "340 GB/s"),
        (words.percent(0.432), "43.2%"),
        (words.percent(0.0001), "<0.1%"),
        (words.change(-0.005), "-0.5%"),
        (words.change(math.inf), "new"),
        (words.money(12340), "$12,340"),
        (words.money(1.25e6, "€"), "€1.25 M"),
        (words.quantity("traffic", "messages tensor send", 12.0), "12"),
        (words.quantity("traffic", "bytes tensor send", 2048.0), "2.00 KiB"),
        (words.quantity("work", "flops ffn forward", 2e12), "2.00 TFLOPs"),
    ],
)
def test_numbers_as_people_say_them(said: str, text: str) -> None:
    assert said == text


SAYERS = [words.size, words.gib, words.seconds, words.count, words.flops, words.percent, words.change, words.money,
          words.slower, words.price, words.digits]  # fmt: skip


@given(st.floats(-1e15, 1e15) | st.floats(-1, 1) | st.integers(-(10**6), 10**6), st.sampled_from(SAYERS))
def test_no_exponents(amount: float, say: object) -> None:
    text = say(amount)  # type: ignore[operator]
    assert not re.search(r"\de[+-]?\d", text), text


@given(st.integers(0, 10**9), st.sampled_from(["rank", "message", "step", "quantity", "microbatch"]))
def test_one_is_one_and_others_are_several(number: int, noun: str) -> None:
    said, word = counted(number, noun).split()
    assert int(said.replace(",", "")) == number
    assert (word == noun) == (number == 1)
    assert word == noun or word.endswith("s")


@given(st.floats(), st.sampled_from(SAYERS))
def test_every_number_has_words(amount: float, say: object) -> None:
    text = say(amount)  # type: ignore[operator]
    assert text
    assert "nan" not in text.lower()
    assert "inf" not in text.lower()


@given(st.floats(1, 1e15))
def test_words_keep_three_digits(amount: float) -> None:
    number, unit = words.size(amount).replace(",", "").split()
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert float(number) * scale == pytest.approx(amount, rel=0.006, abs=0.006 * scale if scale > 1 else 0.5)


def test_every_name_has_its_colour_and_an_axis_always_the_same() -> None:
    assert set(colors.AXIS) == set(AXES)
    assert set(colors.CATEGORY) == set(CATEGORIES)
    assert set(colors.OWNER) == set(OWNERS)
    assert set(colors.PASS) == {*PASSES, "backward"}
    assert all(colors.CATEGORY[axis] == colors.AXIS[axis] for axis in AXES)


# Machado, Oliveira and Fernandes (2009), table 1, severity 1: how linear RGB looks without red or green cones.
SIGHTS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}


def _linear(color: str) -> list[float]:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def _oklab(linear: list[float]) -> tuple[float, ...]:
    def through(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    cones = through(((0.41222, 0.53633, 0.05145), (0.2119, 0.6807, 0.1074), (0.0883, 0.28172, 0.62998)), linear)
    roots = [cone ** (1 / 3) for cone in cones]
    return tuple(
        through(((0.21045, 0.79362, -0.00407), (1.978, -2.42859, 0.45059), (0.0259, 0.78277, -0.80868)), roots)
    )


def _apart(one: str, other: str) -> float:
    """The least distance in OKLab over all sights; 0.02 is just noticeable."""
    distances = []
    for matrix in SIGHTS.values():
        seen = [
            _oklab([max(0.0, sum(a * b for a, b in zip(row, _linear(color), strict=True))) for row in matrix])
            for color in (one, other)
        ]
        distances.append(math.dist(*seen))
    return min(distances)


@pytest.mark.parametrize(
    ("together", "least"),
    [
        (colors.AXIS, 0.11),
        (colors.OWNER, 0.105),
        (colors.CATEGORY, 0.06),
        (colors.PASS, 0.075),
        (colors.CATEGORY | colors.PASS, 0.025),  # a timeline has passes where spans name them, else categories
    ],
)
def test_colours_that_meet_are_told_apart_by_all_eyes(together: dict[str, str], least: float) -> None:
    for (one, first), (other, second) in combinations(together.items(), 2):
        assert _apart(first, second) >= least, (one, other)


def test_passes_and_matrices_are_told_apart_in_greyscale() -> None:
    """By luma, of 255 levels."""
    shown = (colors.PASS["forward"], colors.PASS["backward"], colors.CATEGORY["matmul"])
    levels = [
        sum(w * int(c[i : i + 2], 16) for w, i in zip((0.299, 0.587, 0.114), (1, 3, 5), strict=True)) for c in shown
    ]
    assert all(abs(one - other) >= 35 for one, other in combinations(levels, 2)), levels


def test_colours_show_on_both_papers() -> None:
    def luminance(color: str) -> float:
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), _linear(color), strict=True))

    papers = re.findall(r"--paper: (#\w{6})", (Path(colors.__file__).parent / "page.css").read_text())
    assert len(papers) == 2  # light and dark
    for color in {*colors.CATEGORY.values(), *colors.OWNER.values(), *colors.PASS.values()}:
        for paper in papers:
            dim, bright = sorted((luminance(color), luminance(paper)))
            assert (bright + 0.05) / (dim + 0.05) >= 1.85, (color, paper)
