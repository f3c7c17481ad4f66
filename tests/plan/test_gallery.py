"""The gallery: the page is what the command makes, its predictions never saw their source, and its formulas are the papers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.hardware import find_chip
from shardwise.plan.published.bandwidth import BANDWIDTH, BATCHES
from shardwise.plan.published.gallery import EXHIBITS
from shardwise.plan.published.rows import published
from shardwise.plan.published.validate import predict

PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"


@pytest.mark.drawn(group="searches")
def test_the_page_is_what_the_command_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gallery", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text("utf-8"), "shardwise gallery --markdown > docs/gallery.md"


@pytest.mark.drawn(group="published")
def test_rows_are_predicted_without_their_source() -> None:
    rows = [row for row in published("training") if row["group"] == "korthikanti_t5"]
    lines = EXHIBITS["recompute-step"]().lines
    assert [line.planned for line in lines] == [predict(row).predicted for row in rows]
    assert [line.planned for line in lines] != [predict(row, leave_out=False).predicted for row in rows]


@pytest.mark.parametrize(("name", "within"), [("zero-states", 0.02), ("bubbles", 1e-9)])
def test_formulas_are_those_of_the_papers(name: str, within: float) -> None:
    for line in EXHIBITS[name]().lines:
        assert line.planned == pytest.approx(line.published, rel=within), line.label


def test_operations_of_whole_runs() -> None:
    for line in EXHIBITS["training-flops"]().lines:
        assert abs(line.error) <= (0.01 if "6ND" in line.label else 0.15), line.label


def test_one_exhibit_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gallery", "bubbles", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"label", "published", "planned", "error"} <= set(found["bubbles"]["lines"][0])


def test_a_misspelt_exhibit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gallery", "bubble"]) == 2
    assert "did you mean bubbles" in capsys.readouterr().err


def test_bandwidth_is_what_a_token_reads_over_what_the_memory_could() -> None:
    """Llama 2 70B in 16 bits: a token reads 138 GB, whatever the number of GPUs; its figures took part in no fit."""
    for (chip, devices, _), line in zip(BANDWIDTH, EXHIBITS["model-bandwidth"]().lines, strict=True):
        seconds = 138e9 / (devices * find_chip(chip).hbm) / line.planned
        assert 5e-3 < seconds < 40e-3
        assert line.planned < 0.9
    assert "databricks" not in {row["group"] for row in published("inference")}
    lines = EXHIBITS["static-batches"]().lines
    assert [line.published for line in lines] == [figure for each in BATCHES.values() for figure in each.values()]
    for devices in BATCHES:
        planned = [line.planned for line in lines if line.label.startswith(f"MPT-7B, {devices} x")]
        assert planned == sorted(planned)  # a larger batch answers more
