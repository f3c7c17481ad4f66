"""Operations of single operators, memory over time, the timeline, and the ledger's account of a profile."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_jobs import Host, explained, job_member, message
from profile_files import read, span, text_of

from shardwise.ledger import CATEGORIES, as_dict, compare
from shardwise.report import trace_view
from shardwise.trace.export import account, as_json
from shardwise.trace.flops import flops_of
from shardwise.trace.timeline import POINTS, memory

FLASH = "aten::_scaled_dot_product_flash_attention"


@pytest.mark.parametrize(
    ("name", "shapes", "values", "operations"),
    [
        ("aten::mm", [[3, 4], [4, 5]], [], 120),
        ("aten::addmm", [[5], [3, 4], [4, 5]], [], 120),
        ("aten::_grouped_mm", [[3, 4], [7, 4, 5], [7]], [], 120),  # each row by one of seven
        ("aten::_grouped_mm", [[3, 4], [4, 5], [7]], [], 120),  # seven sums
        ("shardwise::gemm", [[3, 4], [4, 5]], [], 120),
        ("shardwise::gemm_onto", [[3, 4], [4, 5], [3, 5]], [], 120),
        ("aten::mm", [[3, 4], [5]], [], 0),
        ("aten::bmm", [[2, 3, 4], [2, 4, 5]], [], 240),
        ("aten::baddbmm", [[2, 3, 5], [2, 3, 4], [2, 4, 5]], [], 240),
        (FLASH, [[2, 8, 16, 64], [2, 8, 32, 64], [2, 8, 32, 64]], [], 2 * 2 * 8 * 16 * 32 * 128),
        (f"{FLASH}_backward", [[], *[[1, 1, 8, 4]] * 3], [], 2.5 * 2 * 8 * 8 * 8),
        ("aten::_flash_attention_forward", [[48, 8, 64], [48, 2, 64], [48, 2, 64], [5], [5]],
         [*[""] * 5, "16", "16", "0.", "True", "False", "", "7", "0"], 2.0 * 48 * 8 * 8 * 128),
        ("aten::_flash_attention_forward", [[48, 8, 64], [48, 2, 64], [48, 2, 64], [5], [5]], [*[""] * 5, "16", "16"],
         2 * 48 * 8 * 16 * 128),
        ("aten::_flash_attention_backward", [[48, 8, 64], [48, 8, 64], [48, 2, 64], [48, 2, 64]], [*[""] * 8, "16", "16"],
         2.5 * 2 * 48 * 8 * 16 * 128),
        ("aten::convolution", [[1, 3, 8, 8], [6, 3, 3, 3], [6]], ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False"],
         2 * 6 * 4 * 4 * 27),
        ("aten::convolution_backward", [[1, 6, 4, 4], [1, 3, 8, 8], [6, 3, 3, 3]], ["[False, True, False]"], 2 * 6 * 16 * 27),
        ("aten::linear", [[3, 4], [5, 4]], [], 0),  # calls what is counted
        ("aten::mm", [[3], [4, 5]], [], 0),
        ("aten::mm", [], [], 0),
    ],
)  # fmt: skip
def test_operations(name: str, shapes: list, values: list, operations: float) -> None:
    assert flops_of(name, shapes, values) == operations


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.integers(-50, 80), min_size=1, max_size=30), said=st.booleans())
def test_memory_over_time(tmp_path: Path, changes: list[int], said: bool) -> None:
    total, lines, curve = 1000, [], []
    for at, change in enumerate(changes):
        total += change
        told = {"Total Allocated": total, "Total Reserved": 4096} if said else {}
        arguments = {"Bytes": change, "Addr": at, "Device Id": 0, "Device Type": 1} | told
        instant = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": at}
        lines.append(json.dumps(instant | {"args": arguments}))
        curve.append(total)
    profile = read(tmp_path / "rank-0.json", text_of([*lines, span("cpu_op", "aten::empty", 0, 1)]))
    (found,) = memory(profile, 0, 10**9)
    if not said:  # nothing says what was in use before, so the lowest point is taken for nothing
        low = min(0, min(one - 1000 for one in curve))
        curve = [one - 1000 - low for one in curve]
    assert found.peak == max(curve)
    assert found.peak_at == 1000 * curve.index(max(curve))
    assert max(found.allocated) == found.peak
    assert len(found.times) == len(found.allocated) <= POINTS


def small_job(folder: Path, work: int = 300) -> object:
    host = Host()
    host.step(3, 0, 1000)
    host.step(4, 1000, 1000)
    for begin in (0, 1000):
        host.launch("ampere_bf16_gemm", begin + 5, begin + 100, work)
        host.launch("flash_fwd_kernel", begin + 6, begin + 100 + work, 100)
        host.launch(
            "ncclDevKernel_AllGather", begin + 7, begin + 150, work + 150, 9, **message("_allgather_base", 30, "5", 4)
        )
        host.span("cpu_op", "shardwise:phase optimizer", begin + 20, 10)
        host.launch("adam", begin + 22, begin + 300 + work, 50)
    return explained(folder, {0: (job_member(0, 4, {"5": ("mesh_tp", (0, 1, 2, 3))}), host.events)})


def test_an_account_of_the_ledger(tmp_path: Path) -> None:
    found = account(small_job(tmp_path), tokens=512)  # type: ignore[arg-type]
    assert (found.origin, found.step_seconds, found.tokens) == ("trace", 1e-6, 512)
    assert set(found.breakdown) <= set(CATEGORIES)
    # Of each step but the first, 355 ns before it wait for a launch; what comes before the first and after the last is unknown.
    assert {k: round(v * 1e9) for k, v in found.breakdown.items()} == {
        "matmul": 300, "attention": 100, "tensor": 100, "optimizer": 50, "other": 270, "host": 180,
    }  # fmt: skip
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds)
    assert found.traffic.bytes == {"tensor": {"all_gather": 360.0}}
    assert found.traffic.messages == {"tensor": {"all_gather": 1.0}}
    assert {d.name for d in compare(found, found)} >= {"step", "matmul", "bytes tensor all_gather"}


def test_the_timeline_is_in_the_ledgers_words(tmp_path: Path) -> None:
    spans = small_job(tmp_path).timeline.spans  # type: ignore[attr-defined]
    assert {(span.stream, span.category) for span in spans} == {
        ("compute", "matmul"), ("compute", "attention"), ("compute", "memory"), ("tensor", "tensor"),
    }  # fmt: skip
    assert sum(Fraction(str(s.seconds)) for s in spans if s.category == "matmul") == Fraction(600, 10**9)


def test_as_json(tmp_path: Path) -> None:
    found = json.loads(json.dumps(as_json(small_job(tmp_path))))  # type: ignore[arg-type]
    gathered = found["axes"]["tensor"]["all_gather"]
    assert gathered["all"]["bytes"] == gathered["ranks"]["0"]["bytes"] == 720
    assert gathered["all"]["bus_bandwidth"] == 720 / 900e-9
    assert gathered["spread"]["exposed"]["highest_rank"] == 0
    assert sum(found["idle"]["ranks"]["0"].values()) == found["ranks"]["0"]["idle"]
    assert {
        "stragglers",
        "findings",
        "steps",
        "kernels",
        "modules",
        "critical_path",
        "pipelines",
        "memory",
    } <= found.keys()


def test_each_rank_is_divided_by_its_own_steps(tmp_path: Path) -> None:
    """Rank 0 recorded four steps of 1000, rank 1 two of 1500: rank 1 is the slowest, and the mean is over six steps."""
    jobs = {}
    for rank, (steps, length) in enumerate(((4, 1000), (2, 1500))):
        host = Host()
        for number in range(steps):
            host.step(number, number * length, length)
            host.launch("gemm", number * length + 10, number * length + 100, 300 * (rank + 1))
        jobs[rank] = (job_member(rank, 2, {}), host.events)
    answers = explained(tmp_path, jobs)
    assert answers.step_counts == {0: 4, 1: 2}
    assert answers.step_time == 1500
    assert answers.slowest == 1
    found = account(answers)
    assert found.step_seconds == pytest.approx(1500e-9)
    assert sum(found.breakdown.values()) == pytest.approx(1500e-9)
    (row,) = answers.kernels
    assert (answers.per_step(row.count), answers.per_step(row.total)) == (1, (4 * 300 + 2 * 600) / 6)
    plain = as_dict(answers)
    assert trace_view.slowest(plain) == 1
    assert {n: row["span"] for n, row in trace_view.per_step(plain, plain["ranks"]).items()} == {0: 1000, 1: 1500}
    assert sum(trace_view.idle_by_cause(plain).values()) == pytest.approx((4 * 700 + 2 * 900) / 6 / 1e9)
