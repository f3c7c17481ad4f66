"""The picture in the README shows what the command prints today."""

from __future__ import annotations

import plan_picture


def test_the_picture_of_a_plan_shows_the_present_output() -> None:
    shown = plan_picture.words(plan_picture.PICTURE.read_text(encoding="utf-8"))
    assert len(shown) > 50
    assert shown == plan_picture.words(plan_picture.drawn()), "python tests/docs/plan_picture.py draws it anew"
