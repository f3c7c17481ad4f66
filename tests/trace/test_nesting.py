"""The innermost open span and its parent, against a list walked for every moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.trace.spans.intervals import nest

spans = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=14)


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Brackets: spans inside of spans."""
    found: list[tuple[int, int, int]] = []

    def open_one(track: int, low: int, high: int, depth: int) -> None:
        found.append((track, low, high - low))
        at = low
        while depth < 4 and at < high and draw(st.booleans()):
            begin = draw(st.integers(at, high))
            finish = draw(st.integers(begin, high))
            open_one(track, begin, finish, depth + 1)
            at = finish

    for track in range(draw(st.integers(1, 2))):
        open_one(track, draw(st.integers(0, 5)), draw(st.integers(5, 40)), 0)
    return found


def walked(given: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Enclosers, and ends cut to them, by walking each track with a stack."""
    parent, ends = [-1] * len(given), [start + length for _, start, length in given]
    for track in {one[0] for one in given}:
        stack: list[int] = []
        for at, (own, start, _) in enumerate(given):
            if own != track:
                continue
            while stack and ends[stack[-1]] <= start:
                stack.pop()
            if stack:
                parent[at] = stack[-1]
                ends[at] = min(ends[at], ends[stack[-1]])
            if ends[at] > start:
                stack.append(at)
    return parent, ends


@settings(max_examples=300, deadline=None)
@given(st.one_of(spans, nested()))
def test_innermost_and_parent(given_spans: list[tuple[int, int, int]]) -> None:
    ordered = sorted(given_spans, key=lambda one: (one[1], -one[2]))
    track, start, length = (np.array(column, np.int64) for column in zip(*ordered, strict=True))
    found = nest(track, start, start + length)
    parent, ends = walked(ordered)
    assert found.parent.tolist() == parent
    for where in range(3):
        for moment in range(-2, 60):
            open_now = [at for at, (of, begin, _) in enumerate(ordered) if of == where and begin <= moment < ends[at]]
            expected = open_now[-1] if open_now else -1
            assert found.innermost(np.array([where]), np.array([moment]))[0] == expected


def test_nothing() -> None:
    none = np.zeros(0, np.int64)
    assert nest(none, none, none).innermost(np.array([0]), np.array([5])).tolist() == [-1]
