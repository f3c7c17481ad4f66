"""The terminal's pictures: within the width, adding up, and readable without colour."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import GIB, accounts, memories, pipeline_memory, pipeline_step, texts, timelines, traffics
from rich.console import Console, RenderableType

from shardwise.ledger import Account, Difference, Memory, Span, Timeline, Traffic
from shardwise.report import cells, html, pick, terminal, words
from shardwise.report.pick import Column

quick = settings(max_examples=25, deadline=None)
widths = st.sampled_from([60, 80, 160])


def lines(drawn: RenderableType, width: int = 80, color: bool = False) -> list[str]:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
        legacy_windows=False,
    )
    console.print(drawn)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert color or "\x1b" not in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "nan" not in plain
    return plain.splitlines()


@quick
@given(memories, accounts, traffics, timelines, widths, st.booleans())
def test_nothing_is_wider_than_the_terminal(
    memory: Memory, account: Account, traffic: Traffic, timeline: Timeline, width: int, color: bool
) -> None:
    drawn = (terminal.memory_bars(memory), terminal.breakdown_bar(account), terminal.traffic_table(traffic),
             terminal.timeline(timeline, width))  # fmt: skip
    for each in drawn:
        assert all(len(line) <= width for line in lines(each, width, color))


@quick
@given(st.lists(st.tuples(texts, texts, texts), max_size=4))
def test_text_is_never_markup(figures: list[tuple[str, str, str]]) -> None:
    lines(terminal.key_figures([*figures, ("[bold]", "[/red]", "[")]))
    assert "[bold]  [31m" in "".join(lines(terminal.notes(["[bold] \x1b[31m"])))


@pytest.mark.parametrize("ranks", [1, 8, 9, 64])
def test_memory_adds_up(ranks: int) -> None:
    memory = pipeline_memory(ranks)
    bars = pick.memory_bars(memory)
    shown = lines(terminal.memory_bars(memory))
    total = next(line for line in shown if line.split()[:1] == ["all"]).split()[1:]
    assert total == [words.gib(bar.total) for bar in bars]
    if ranks <= 8:
        assert [bar.total for bar in bars] == list(memory.totals)
    else:
        assert [bar.label for bar in bars] == ["0", str(ranks - 1), "rest"]
        assert bars[-1].total * (ranks - 2) == pytest.approx(sum(memory.totals[1:-1]))


def test_the_capacity_is_marked_and_what_exceeds_it_said() -> None:
    shown = lines(terminal.memory_bars(pipeline_memory(2, capacity=50 * GIB)))
    bar = next(line for line in shown if "over by" in line)
    before, after = re.search(r"([A-Z]+)\|([A-Z]*)", bar).groups()  # type: ignore[union-attr]
    assert len(before) / (len(before) + len(after)) == pytest.approx(50 / 54.5, abs=0.03)
    assert "over by 4.50 GiB" in shown[2]


@given(st.lists(st.floats(0, 1e12), max_size=9), st.integers(1, 200))
def test_a_stacked_bar_has_the_length_of_its_sum(values: list[float], width: int) -> None:
    scale = max(sum(values), 1.0)
    given_cells = cells.stacked(values, scale, width)
    assert all(each >= 0 for each in given_cells)
    assert sum(given_cells) == min(width, round(sum(values) / scale * width))


def test_time_not_in_a_category_is_said() -> None:
    account = Account("run", 2.0, 1e6, {"matmul": 1.0, "bubble": 0.5})
    assert pick.breakdown(account) == [("matmul", 1.0), ("bubble", 0.5), ("not accounted for", 0.5)]
    almost = replace(account, breakdown={**account.breakdown, "host": 4e-10})
    assert pick.breakdown(almost) == pick.breakdown(account)


def test_no_two_kinds_have_the_same_letter() -> None:
    for letters in (cells.KIND_LETTERS, cells.OWNER_LETTERS):
        assert len(set(letters.values())) == len(letters)


def test_the_timeline_says_what_it_leaves_out() -> None:
    drawn = pipeline_step(ranks=4, microbatches=4)
    assert "not drawn" not in lines(terminal.timeline(drawn), 160)[0]
    assert lines(terminal.timeline(replace(drawn, left_out=9)), 160)[0].endswith("; 9 more not drawn")
    assert "; 9 more not drawn." in html.timeline(replace(drawn, left_out=9)).remark


def test_the_timeline_shows_each_pass_and_the_waiting() -> None:
    step = pipeline_step(ranks=4, microbatches=4)
    wide = lines(terminal.timeline(step), 160)
    rows = [line[2:] for line in wide if re.match(r"\d ", line) and ("<" in line)]
    assert len(rows) == 4
    assert all(len(row) == 158 for row in rows)
    assert rows[0][0] == ">"
    assert rows[3][0] == "."  # the last rank waits for the first
    share = sum(row.count(".") for row in rows) / (4 * 158)
    busy = sum(span.seconds for span in step.spans if span.stream == "compute") / (4 * step.seconds)
    assert share == pytest.approx(1 - busy, abs=0.04)


def test_of_a_long_pipeline_both_ends_are_drawn() -> None:
    shown = lines(terminal.timeline(pipeline_step(ranks=64, microbatches=64)))
    assert len(shown) < 30
    assert any("41 more ranks" in line for line in shown)


def test_traffic_that_computing_hides_is_not_drawn() -> None:
    hidden = Span(0, "tensor", "all_gather", "tensor", 0.0, 0.5)
    exposed = Span(0, "shard", "all_gather", "shard", 0.5, 0.5)
    row = cells.paint([Span(0, "compute", "forward", "matmul", 0.0, 0.5), hidden, exposed], 1.0, 10)
    assert [(piece.span.stream, piece.cells) for piece in row if piece.span] == [("compute", 5), ("shard", 5)]


def test_a_ranking_drops_columns_that_do_not_fit_and_says_so() -> None:
    rows = [{"layout": "tensor 8", "step": 1.5, "note": "x" * 70}, {"layout": "tensor 4", "step": 2.5}]
    columns = [Column("layout", "layout"), Column("step", "step", words.seconds), Column("note", "remark")]
    narrow = "\n".join(lines(terminal.ranking_table(rows, columns)))
    assert "not shown, the terminal is too narrow: remark" in narrow
    assert "1.50 s" in narrow
    assert "x" * 70 in "\n".join(lines(terminal.ranking_table(rows, columns), 160))
    lines(terminal.ranking_table([], columns))


def test_a_comparison_marks_what_is_beyond_tolerance() -> None:
    differences = [
        Difference("time", "step", 1.0, 1.2),
        Difference("memory", "rank 0 parameters", 0.0, 2.0),
        Difference("time", "matmul", 1.0, float("nan")),
        Difference("time", "bubble", 1.0, 1.01),
    ]
    shown = lines(terminal.comparison_table(differences, 0.05))
    assert shown[0].endswith("3 of 4 quantities differ by more than the tolerance.")
    assert sum(line.rstrip().endswith("!") for line in shown) == 3
    only = lines(terminal.comparison_table(differences, {"time": 0.5}, only_beyond=True))
    assert [line.split()[0] for line in only[3:]] == ["memory", "time"]
    assert "agree" in lines(terminal.comparison_table(differences[3:], 0.05, only_beyond=True))[0]


def test_a_ranking_folds_what_is_essential_before_it_drops_it() -> None:
    rows = [{"layout": "tensor 8 " * 12, "step": 1.5, "note": "short", "next": "zero 3 → 1"}]
    columns = [
        Column("layout", "layout", essential=True),
        Column("note", "remark"),
        Column("next", "next", below=True),
        Column("step", "step", words.seconds, essential=True),
    ]
    shown = lines(terminal.ranking_table(rows, columns), 60)
    assert "1.50 s" in "\n".join(shown)
    assert max(map(len, shown)) <= 60
    assert shown[-1].endswith("too narrow: remark")
    assert shown[-3:-1] == ["next of each:", "1 zero 3 → 1"]
    assert " ".join(word for line in shown for word in line.split()).count("tensor") == 12
