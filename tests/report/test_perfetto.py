"""The trace: JSON that parses, exact to the nanosecond, with every name in its place."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from records import pipeline_step, timelines

from shardwise.ledger import CATEGORIES, Span, Timeline
from shardwise.report.perfetto import CNAME, chrome_trace, write_chrome_trace


def events(timelines: dict[str, Timeline]) -> list[dict[str, Any]]:
    return json.loads("".join(chrome_trace(timelines)), parse_float=Decimal)["traceEvents"]


def test_an_empty_trace_is_a_trace() -> None:
    assert events({}) == []
    assert events({"plan: pipeline rank": Timeline()}) == []


@settings(max_examples=40, deadline=None)
@given(timelines, timelines)
def test_any_timeline_is_kept_whole(first: Timeline, second: Timeline) -> None:
    found = [event for event in events({"plan: pipeline rank": first, "run": second}) if event["ph"] == "X"]
    spans = [*first.spans, *second.spans]
    assert sorted((e["name"], e["ts"] * 1000) for e in found) == sorted((s.name, round(s.start * 1e9)) for s in spans)
    exact = sum(round((s.start + s.seconds) * 1e9) - round(s.start * 1e9) for s in spans)
    assert sum(e["dur"] for e in found) * 1000 == exact
    threads: dict[tuple[int, int], list[tuple[Decimal, Decimal]]] = {}
    for event in found:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spent in threads.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(spent))


def test_spans_that_touch_still_touch() -> None:
    third = 1 / 3
    spans = tuple(Span(0, "compute", "forward", "matmul", at * third, third) for at in range(100))
    found = [event for event in events({"plan: pipeline rank": Timeline(spans, 100 * third)}) if event["ph"] == "X"]
    assert {event["tid"] for event in found} == {1}
    assert sum(event["dur"] for event in found) == Decimal("33333333.333")


def test_names_order_and_arguments() -> None:
    found = events({"plan: pipeline rank": pipeline_step(ranks=2, microbatches=4)})
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"].get("name", e["args"].get("sort_index"))
        for e in found
        if e["ph"] == "M"
    }
    assert names["process_name", 1, 0] == "plan: pipeline rank 0"
    assert names["process_name", 2, 0] == "plan: pipeline rank 1"
    assert names["process_sort_index", 2, 0] == 2
    assert [names["thread_name", 1, thread] for thread in (1, 2)] == ["compute", "tensor"]
    work = [event for event in found if event["ph"] == "X"]
    assert work[0]["args"] == {"microbatch": 0, "stage": 0}
    assert {e["cname"] for e in work if e["name"] == "backward"} == {"bad"}
    assert next(e for e in work if e["name"] == "optimizer")["args"] == {}
    assert set(CNAME) == set(CATEGORIES)
    assert len(set(CNAME.values())) == len(CNAME)


def test_a_file_may_be_compressed(tmp_path: Path) -> None:
    step = {"plan: pipeline rank": pipeline_step(ranks=2, microbatches=2)}
    write_chrome_trace(step, tmp_path / "a.json")
    write_chrome_trace(step, str(tmp_path / "a.json.gz"))
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (tmp_path / "a.json").read_bytes()
