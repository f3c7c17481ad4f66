"""Which module a kernel belongs to: forward by the innermost module, backward by autograd's numbers, recomputed, or by phase."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_jobs import Host, explained

from shardwise.trace.answers import Explanation

NODE = "autograd::engine::evaluate_function: AddmmBackward0"


def by_module(answers: Explanation) -> dict[str, dict[str, int]]:
    """Nanoseconds by module and pass."""
    return {row.module: {name: time for name, time in row.passes.items() if time} for row in answers.modules.rows}


def numbered(sequence: int, thread: int = 0) -> dict[str, int]:
    """What a numbered operator carries."""
    return {"Sequence number": sequence, "Fwd thread id": thread}


def labelled_model(host: Host) -> None:
    """A forward pass of two modules, its backward pass on another thread with one of them repeated, and an optimizer."""
    host.span("cpu_op", "shardwise:module model", 0, 1000)
    for at, name in ((100, "layers.0"), (500, "layers.1")):
        host.span("cpu_op", f"shardwise:module {name}", at, 300)
        host.span("cpu_op", f"shardwise:module {name}.ffn", at + 100, 100)
        host.span("cpu_op", "aten::addmm", at + 110, 50, **numbered(at))
        host.launch("gemm", at + 120, 2000 + at, 10)
        host.span("cpu_op", "aten::add", at + 210, 50, **numbered(at + 1))
        host.launch("add", at + 220, 2100 + at, 7)
    host.launch("loss", 900, 2900, 3)
    # Backward, on a thread that autograd made.
    host.span("cpu_op", NODE, 3000, 100, tid=2, **numbered(500, 1))
    host.launch("dgemm", 3010, 4000, 20, tid=2)
    host.span("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 3110, 20, tid=2)
    host.launch("accumulate", 3120, 4050, 5, tid=2)
    host.span("cpu_op", NODE, 3200, 300, tid=2, **numbered(100, 1))
    host.span("cpu_op", "shardwise:module layers.0.ffn", 3210, 100, tid=2)
    host.span("cpu_op", "aten::addmm", 3220, 50, tid=2, **numbered(7))  # numbers a new node: forward once more
    host.launch("gemm", 3230, 4100, 10, tid=2)
    host.launch("dgemm", 3400, 4200, 21, tid=2)
    host.span("cpu_op", "shardwise:phase optimizer", 5000, 100)
    host.launch("adam", 5010, 6000, 30)
    host.launch("stray", 5500, 6100, 2)


def test_labels(tmp_path: Path) -> None:
    host = Host()
    labelled_model(host)
    answers = explained(tmp_path, {0: ("", host.events)})
    assert by_module(answers) == {
        "layers.0": {"forward": 7},
        "layers.0.ffn": {"forward": 10, "recompute": 10, "backward": 21},
        "layers.1": {"forward": 7},
        "layers.1.ffn": {"forward": 10, "backward": 25},  # with the gradient that was added to
        "model": {"forward": 3},
        "(phase optimizer)": {"other": 30},
        "(nowhere)": {"other": 2},
    }
    everything = 10 + 7 + 10 + 7 + 3 + 20 + 5 + 10 + 21 + 30 + 2
    assert answers.modules.attributed[0] == (everything - 2) / everything
    assert answers.modules.in_modules[0] == (everything - 32) / everything
    kernels = {row.name: row for row in answers.kernels}
    assert (kernels["gemm"].count, kernels["gemm"].total, kernels["gemm"].module) == (3, 30, "layers.0.ffn")
    assert kernels["gemm"].share == 30 / everything


def test_python_frames(tmp_path: Path) -> None:
    host = Host()
    host.span("python_function", "nn.Module: Net_0", 0, 100)
    host.span("python_function", "nn.Module: Linear_1", 10, 50)
    host.launch("gemm", 20, 200, 5)
    host.launch("add", 70, 300, 6)
    found = by_module(explained(tmp_path, {0: ("", host.events)}))
    assert found == {"Net_0.Linear_1": {"forward": 5}, "Net_0": {"forward": 6}}


def test_ranges_of_the_user(tmp_path: Path) -> None:
    host = Host()
    host.span("user_annotation", "encoder", 0, 100)
    host.launch("gemm", 20, 200, 5)
    host.span("user_annotation", "## backward ##", 100, 100)
    host.launch("sum", 120, 300, 6)
    host.span("user_annotation", "Optimizer.step#AdamW.step", 200, 100)
    host.launch("adam", 220, 400, 7)
    host.events.append(host.events[2].replace('"gemm"', '"early"').replace('"correlation": 1', '"correlation": 99'))
    found = by_module(explained(tmp_path, {0: ("", host.events)}))
    assert found == {
        "encoder": {"forward": 5}, "## backward ##": {"backward": 6}, "(phase optimizer)": {"other": 7},
        "(launch not recorded)": {"other": 5},
    }  # fmt: skip


@pytest.mark.parametrize("outer", ["aten::linear", "shardwise::gemm"])  # not counted; counted, and may call what is
def test_operations_by_module(tmp_path: Path, outer: str) -> None:
    host = Host()
    shapes = {"Input Dims": [[8, 16], [16, 32]], "Input type": ["float", "float"]}
    host.span("cpu_op", "shardwise:module a", 0, 100)
    host.span("cpu_op", outer, 5, 50, **shapes)
    host.span("cpu_op", "aten::mm", 10, 30, **shapes)
    host.launch("gemm", 20, 200, 800)
    answers = explained(tmp_path, {0: ("", host.events)}, peak=1e13)
    operations = 2 * 8 * 16 * 32
    assert {row.module: row.flops for row in answers.modules.rows} == {"a": operations}
    assert answers.flops.ranks == {0: operations}
    assert answers.flops.utilisation == pytest.approx({0: operations / (1e13 * 800e-9)})
