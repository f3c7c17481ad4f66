"""The picture in the README shows what the command prints today, those of the axes what is planned today."""

from __future__ import annotations

import axis_pictures
import pipeline_pictures
import plan_picture
import pytest


def test_the_picture_of_a_plan_shows_the_present_output() -> None:
    shown = plan_picture.words(plan_picture.PICTURE.read_text(encoding="utf-8"))
    assert len(shown) > 50
    assert shown == plan_picture.words(plan_picture.drawn()), "python tests/docs/plan_picture.py draws it anew"


@pytest.mark.parametrize("name", pipeline_pictures.PICTURES)
def test_the_pictures_of_pipelines_are_the_present_lists(name: str) -> None:
    shown = (pipeline_pictures.DOCS / f"{name}.svg").read_text(encoding="utf-8")
    assert shown == pipeline_pictures.drawn(name), "python tests/docs/pipeline_pictures.py draws it anew"


@pytest.mark.parametrize("axis", axis_pictures.AXES)
def test_the_picture_of_an_axis_shows_the_present_plan(axis: str) -> None:
    shown = axis_pictures.picture(axis).read_text(encoding="utf-8")
    assert shown == axis_pictures.drawn(axis), f"python tests/docs/axis_pictures.py {axis} draws it anew"
