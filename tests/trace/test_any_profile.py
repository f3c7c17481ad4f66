"""Whatever a profile holds, every answer can be given, parts add up, and the answers can be written."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_jobs import explained, job_member
from profile_files import device_events, host_events, span

from shardwise.trace.export import account, as_json, differences, kernel_changes

_NAMES = (
    "cudaLaunchKernel", "cudaStreamSynchronize", "cudaGraphLaunch", "aten::mm", "c10d::allreduce_", "c10d::send", "c10d::recv_",
    "gloo:recv", "nccl:all_to_all", "shardwise:action F0.0", "shardwise:action B0.0", "shardwise:action oh", "shardwise:module a",
    "shardwise:phase data", "shardwise:message tensor all_gather 7/2", "shardwise:message odd", "nn.Module: Net_0",
    "autograd::engine::evaluate_function: MmBackward0", "enumerate(DataLoader)#x", "Optimizer.step#SGD.step",
)  # fmt: skip


@st.composite
def host_and_device(draw: st.DrawFn) -> list[str]:
    """Anything on a device or not, and around it anything of what the answers look for, with numbers that fit nothing."""
    events = draw(st.one_of(device_events(), host_events()))
    for _ in range(draw(st.integers(0, 12))):
        more = {name: draw(st.integers(-1, 3)) for name in ("correlation", "Sequence number", "Fwd thread id")}
        if draw(st.booleans()):
            dims = draw(st.sampled_from(([[2, 3], [3, 4]], [], [[]], "x", [[1, "y"]])))
            more |= {"Input Dims": dims, "Input type": ["float", "float"]}
        category = draw(st.sampled_from(("cpu_op", "user_annotation", "cuda_runtime", "python_function")))
        events.append(span(category, draw(st.sampled_from(_NAMES)), draw(st.integers(0, 150)), draw(st.integers(0, 60)),
                           tid=draw(st.integers(1, 2)), **more))  # fmt: skip
    return events


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs=st.lists(host_and_device(), min_size=1, max_size=2), known=st.booleans())
def test_every_answer(tmp_path: Path, jobs: list[list[str]], known: bool) -> None:
    groups = {"0": ("default_pg", (0, 1)), "1": ("pipeline", (0, 1)), "2": ("tensor", (0, 1))} if known else {}
    answers = explained(
        tmp_path, {rank: (job_member(rank, 2, groups), events) for rank, events in enumerate(jobs)}, 1e12
    )
    for rank in answers.seen:
        assert sum(answers.idle[rank].values()) == answers.ranks[rank]["idle"]
        assert sum(answers.categories[rank].values()) == answers.ranks[rank]["span"]
        assert min(answers.idle[rank].values()) >= 0
    path = answers.critical_path
    if path is not None:
        assert sum(path.categories.values()) == sum(path.ranks.values()) == path.length
    for row in answers.axes:
        for moved in row.ranks.values():
            assert 0 <= moved.exposed <= moved.time <= moved.summed or moved.messages == 0
            assert 0 <= moved.wait <= moved.summed
    json.dumps(as_json(answers))
    assert all(one.relative == 0 for one in differences(answers, answers))
    assert all(one.change == 0 for one in kernel_changes(answers, answers))
    assert account(answers).breakdown is not None
