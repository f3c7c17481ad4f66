"""MFU says of how much of the GEMMs it knows the FLOPs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_jobs import Host, explained, job_member

from shardwise.ledger import as_dict
from shardwise.report import trace_view
from shardwise.trace.flops import flops_of


def figure(folder: Path, unknown: int) -> tuple[float, str]:
    """300 ns of a GEMM with shapes, and so many of one without; a kernel of another kind does not count."""
    host = Host()
    host.step(0, 0, 1000)
    shapes: dict[str, Any] = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    host.span("cpu_op", "aten::mm", 0, 20, **shapes)
    host.launch("ampere_sgemm", 5, 30, 300)
    host.span("cpu_op", "my::fused_gemm", 20, 20)
    host.launch("my_gemm", 25, 400, unknown)
    host.launch("copy_kernel", 50, 900, 50)
    answers = explained(folder, {0: (job_member(0, 1, {}), host.events)}, peak=1e15)
    notes = {name: note for name, _, note in trace_view.figures(as_dict(answers))}
    return answers.flops.known[0], notes["MFU"]


def test_the_share_is_said(tmp_path: Path) -> None:
    share, note = figure(tmp_path, 100)
    assert share == pytest.approx(0.75)
    assert "knows 75.0%" in note


def test_nothing_is_said_where_all_is_known(tmp_path: Path) -> None:
    share, note = figure(tmp_path, 0)
    assert share == 1.0
    assert "knows" not in note


@pytest.mark.parametrize("transposed", [False, True])
def test_transposed_convolutions_are_not_counted_in_either_pass(transposed: bool) -> None:
    x, weight, y = [1, 8, 16, 16], [8, 4, 2, 2], [1, 4, 32, 32]
    if not transposed:
        x, y = y, x
    how = ["[2, 2]", "[0, 0]", "[1, 1]", str(transposed), "[0, 0]", "1"]
    forward = flops_of("aten::convolution", [x, weight, []], ["", "", "", *how])
    backward = flops_of("aten::convolution_backward", [y, x, weight], ["", "", "", "[4]", *how, "[True, True, False]"])
    expected = 0 if transposed else 2 * (8 * 16 * 16) * (4 * 2 * 2)
    assert (forward, backward) == (expected, 2 * expected)
