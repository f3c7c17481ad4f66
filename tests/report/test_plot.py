"""Pictures of points and lines: where things are drawn, and that nothing of the input gets out of its place."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from shardwise.report.plot import HIGH, WIDE, Plot, Series, letters, marks, svg

PLOT = Plot(
    "A <title>", "x & more", "y",
    [Series("line", [(1, 1), (10, 2), (100, 3)], band=[(1, 0.5, 1.5), (100, 2.5, 3.5)]),
     Series("<points>", [(1, 1), (100, 3), (0, 2)], joined=False)],
)  # fmt: skip


def test_svg_is_well_formed_and_inside_of_its_frame() -> None:
    root = ElementTree.fromstring(svg([PLOT, PLOT]))
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == 4  # a point without a logarithm is left out
    assert all(0 <= float(each.get("cx", "")) <= WIDE and 0 <= float(each.get("cy", "")) <= HIGH for each in circles)
    assert float(circles[0].get("cx", "")) < float(circles[1].get("cx", ""))
    assert float(circles[0].get("cy", "")) > float(circles[1].get("cy", ""))
    assert root.get("height") == str(2 * HIGH)


def test_letters_show_points_over_lines() -> None:
    lines = letters(PLOT, 40, 9)
    assert lines[0] == "A <title> (y)"
    assert lines[-1].strip() == "a <points>"
    rows = [line.partition("│")[2] for line in lines[1:10]]
    assert sum(row.count("a") for row in rows) == 2
    assert sum(row.count("·") for row in rows) == 1


@pytest.mark.parametrize("value", [0.0, -3.0, 1e17, -1e300])
def test_equal_values_have_an_axis(value: float) -> None:
    """At 1e17 a half is lost in the rounding, and an axis without a length was divided by."""
    plot = Plot("", "x", "y", [Series("all", [(value, value)] * 2, joined=False)], log_x=False)
    assert svg([plot]).count("<circle") == 2
    assert sum(line.count("a") for line in letters(plot)[1:-3]) == 1


@pytest.mark.parametrize(
    ("low", "high", "log", "want"),
    [
        (0.0, 3.0, True, [1, 10, 100, 1000]),
        (0.0, 0.5, True, [1, 2, 3]),
        (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_marks(low: float, high: float, log: bool, want: list[float]) -> None:
    assert marks(low, high, log) == pytest.approx(want)


def test_a_point_by_itself_has_its_name_beside_it() -> None:
    places = {"first": (1.0, 1.0), "close": (1.05, 1.0), "last": (100.0, 2.0)}
    picture = svg([Plot("", "x", "y", [Series(name, [place], joined=False) for name, place in places.items()])])
    found = {name: anchor for anchor, name in re.findall(r'text-anchor="(\w+)">(first|close|last)<', picture)}
    assert found == {"first": "end", "close": "start", "last": "end"}
