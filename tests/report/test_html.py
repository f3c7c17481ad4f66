"""The page: well formed, escaped, alone, and its numbers those of the record."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import accounts, memories, pipeline_memory, pipeline_step, texts, timelines, traffics

from shardwise.ledger import Account, Difference, Memory, Span, Timeline, Traffic
from shardwise.report import html, words
from shardwise.report.html_timeline import timeline_data, timeline_rows
from shardwise.report.pick import Column, pareto_front

quick = settings(max_examples=25, deadline=None)
ATTACK = "</script><script>alert('x')</script>\"&"
COLUMNS = [
    Column("layout", "layout"),
    Column("step", "step", words.seconds, "low"),
    Column("memory", "memory", words.size, "low", 2.0**30),
    Column("gpus", "GPUs", words.count, "low"),
]


class Reader(HTMLParser):
    """Checks that elements close in order; keeps text, attributes and the data of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: list[Any] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and self.elements[-1][1].get("type") == "application/json":
            self.data.append(json.loads(data))
        elif self.open[-1:] != ["script"]:
            self.text += data


def read(*sections: html.Section, title: str = "a plan") -> Reader:
    page = html.page(title, sections)
    assert "http" not in page
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<script>.*?</script>", "", page, flags=re.S), re.I)
    return Reader(page)


@quick
@given(memories, accounts, traffics, timelines, texts)
def test_any_record_makes_a_sound_page(
    memory: Memory, account: Account, traffic: Traffic, timeline: Timeline, text: str
) -> None:
    reader = read(
        html.key_figures([(text, text, text)]),
        html.memory_bars(memory),
        html.breakdown_bar(account),
        html.traffic_table(traffic),
        html.timeline(timeline),
        html.notes([text]),
    )
    for tag, attributes in reader.elements:
        if tag == "rect" and not attributes["width"].endswith("%"):  # type: ignore[union-attr]
            assert float(attributes["width"]) >= 0  # type: ignore[arg-type]
            assert float(attributes.get("x") or 0) <= 1024


def test_text_cannot_become_code() -> None:
    rows = [{"layout": ATTACK, "step": 1.0, "memory": 2.0**30, "gpus": 8}]
    reader = read(
        html.key_figures([(ATTACK,) * 3]),
        html.memory_bars(Memory(({ATTACK: 2.0**30},), 2.0**33)),
        html.breakdown_bar(Account("plan", 1.0, 1.0, {ATTACK: 1.0})),
        html.traffic_table(Traffic({ATTACK: {ATTACK: 1.0}})),
        html.timeline(Timeline((Span(0, ATTACK, ATTACK, ATTACK, 0.0, 1.0),), 1.0)),
        html.ranking_table(rows, [*COLUMNS, Column("layout", ATTACK)], title=ATTACK),
        html.scatter(rows, COLUMNS[2], COLUMNS[1], COLUMNS[3], COLUMNS[0], title=ATTACK),
        html.comparison_table([Difference(ATTACK, ATTACK, 1.0, 2.0)], 0.1, (ATTACK, ATTACK)),
        html.notes([ATTACK]),
        title=ATTACK,
    )
    assert len([tag for tag, _ in reader.elements if tag == "script"]) == 2  # the timeline's numbers and the page's own
    assert reader.data[0]["names"] == [ATTACK]
    assert reader.text.count(ATTACK) >= 12


@pytest.mark.parametrize("ranks", [1, 16, 100])
def test_memory_bars_are_as_long_as_the_memory(ranks: int) -> None:
    memory = pipeline_memory(ranks, capacity=0.0)
    reader = read(html.memory_bars(memory))
    rows: dict[str, float] = {}
    for tag, attributes in reader.elements:
        if tag == "rect" and "data-tip" in attributes:
            rows[attributes["y"]] = rows.get(attributes["y"], 0.0) + float(attributes["width"])  # type: ignore[index, arg-type]
    if ranks <= 64:
        longest = max(rows.values())
        assert [width / longest for width in rows.values()] == pytest.approx(
            [total / memory.peak for total in memory.totals], abs=1e-3
        )
    assert len(rows) == min(ranks, 64) if ranks <= 64 else 3


def test_the_timeline_keeps_every_span_to_the_nanosecond() -> None:
    step = pipeline_step()
    data = read(html.timeline(step)).data[0]
    seen = []
    for row in data["rows"]:
        start = 0
        columns = np.frombuffer(b64decode(row["d"]), "<u4").reshape(3, -1).T.tolist()
        places = (
            np.frombuffer(b64decode(row["m"]), "<i2").reshape(2, -1).T.tolist()
            if "m" in row
            else [(-1, -1)] * len(columns)
        )
        for (delta, taken, what), (microbatch, stage) in zip(columns, places, strict=True):
            kind, name = what >> 24, what & 0xFFFFFF
            start += delta
            assert 0 <= kind < len(data["kinds"])
            seen.append((row["stream"], data["names"][name], start, taken, microbatch, stage))
    told = [
        (s.stream, s.name.replace("_", " "), round(s.start * 1e9), s.microbatch, s.stage) for s in step.spans
    ]  # fmt: skip
    assert sorted((s[0], s[1], s[2], s[4], s[5]) for s in seen) == sorted(told)
    kinds = [kind[0] for kind in data["kinds"]]
    assert sorted(kinds) == ["backward", "forward", "optimizer", "tensor"]
    assert sum(s[3] for s in seen) == pytest.approx(sum(s.seconds for s in step.spans) * 1e9, abs=len(seen))


@quick
@given(timelines, st.integers(1, 40))
def test_a_thinned_timeline_still_adds_up(timeline: Timeline, most: int) -> None:
    whole, thin = (timeline_rows(timeline, many) for many in (10**9, most))
    assert sum(len(row.spans) for row in thin) <= max(most, 4 * len(whole))
    for one, other in zip(whole, thin, strict=True):
        assert sum(s.seconds for s in other.spans) == pytest.approx(sum(s.seconds for s in one.spans))
    timeline_data(timeline, thin)


def test_the_legend_names_each_kind_once() -> None:
    text = read(html.timeline(pipeline_step())).text
    assert "forwardbackwardoptimizertensor" in text


@pytest.mark.parametrize("kinds", [255, 256, 300])
def test_more_kinds_than_a_byte_can_count(kinds: int) -> None:
    """Process groups are kinds: a large job can have more of them than the page has numbers."""
    spans = tuple(Span(at % 3, f"group {at}", "send", f"group {at}", float(at), 0.5) for at in range(kinds))
    data = read(html.timeline(Timeline(spans, float(kinds)))).data[0]
    seen = []
    for row in data["rows"]:
        (what,) = np.frombuffer(b64decode(row["d"]), "<u4").reshape(3, -1)[2].tolist()
        seen.append((row["stream"], data["kinds"][what >> 24][0]))
    assert len(seen) == kinds
    own = [stream == kind for stream, kind in seen]
    assert own == [at < 255 for at in range(kinds)]
    assert {kind for stream, kind in seen[255:]} <= {"more"}


def test_a_big_timeline_stays_small() -> None:
    spans = tuple(
        Span(at % 16, "compute", "forward", "matmul", at // 16 * 1e-3, 0.9e-3, at // 16, at % 16)
        for at in range(20_000)
    )
    assert len(html.page("big", [html.timeline(Timeline(spans, 1.3))])) < 1_000_000


def test_a_ranking_carries_what_it_sorts_by() -> None:
    rows = [{"layout": "b", "step": 2.0, "memory": 2.0**30, "gpus": 8}, {"layout": "a", "step": 0.5}]
    reader = read(html.ranking_table(rows, COLUMNS))
    values = [attributes["data-v"] for tag, attributes in reader.elements if tag == "td"]
    assert values == ["1", "b", "2.0", str(2.0**30), "8", "2", "a", "0.5", "", ""]


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=25))
def test_the_front_is_what_nothing_beats(scores: list[tuple[int, int, int]]) -> None:
    columns = [Column("a", "a", better="low"), Column("b", "b", better="high"), Column("c", "c", better="low")]
    rows = [dict(zip("abc", score, strict=True)) for score in scores]
    points = [(a, -b, c) for a, b, c in scores]
    expected = [
        not any(q != p and all(x <= y for x, y in zip(q, p, strict=True)) for q in points) for p in points
    ]  # fmt: skip
    assert pareto_front(rows, columns) == expected


@quick
@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(0, 1e12), st.sampled_from([8, 64, 512])), max_size=12))
def test_points_stay_within_the_picture(points: list[tuple[float, float, int]]) -> None:
    rows = [dict(layout="x", step=step, memory=memory, gpus=gpus) for step, memory, gpus in points]
    reader = read(html.scatter(rows, COLUMNS[2], COLUMNS[1], COLUMNS[3], COLUMNS[0], limit=80 * 2.0**30))
    circles = [attributes for tag, attributes in reader.elements if tag == "circle"]
    assert len(circles) == len(points)
    assert all(0 <= float(c["cx"]) <= 1024 and 0 <= float(c["cy"]) <= 452 for c in circles)  # type: ignore[arg-type]


def test_a_comparison_marks_what_is_beyond_tolerance() -> None:
    differences = [Difference("time", "step", 1.0, 1.2), Difference("time", "matmul", 1.0, 1.01)]
    reader = read(html.comparison_table(differences, 0.05))
    assert "1 of 2 quantities differ" in reader.text
    assert sum(attributes.get("class") == "beyond" for _, attributes in reader.elements) == 1
    assert "input" in [tag for tag, _ in reader.elements]
    assert "input" not in [tag for tag, _ in read(html.comparison_table(differences, 0.5)).elements]
