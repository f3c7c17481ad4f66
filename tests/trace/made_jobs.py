"""Jobs of several ranks made up for the tests, with everything about them known: clocks, arrivals, modules, schedules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profile_files import kernel, read, span, text_of

from shardwise.trace.answers import Explanation
from shardwise.trace.explain import explain
from shardwise.trace.rank import Rank
from shardwise.trace.spans.activity import activity_of
from shardwise.trace.spans.steps import select_steps

HOST = dict(pid=1, tid=1)


def job_member(rank: int, world: int, groups: Mapping[str, tuple[str, Sequence[int]]], backend: str = "nccl") -> str:
    """The member that says rank and groups: name to description and ranks."""
    config = [
        {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": list(ranks)}
        for name, (description, ranks) in groups.items()
    ]
    info = {"backend": backend, "rank": rank, "world_size": world, "pg_config": config}
    return (
        f'"distributedInfo": {json.dumps(info)}, "deviceProperties": [{{"id": 0, "name": "NVIDIA H100 80GB HBM3"}}], '
    )


class Host:
    """Writes events of one rank: a launch on the host and what it launches carry one number."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.number = 0

    def launch(self, name: str, call: int, start: int, duration: int, stream: int = 7, category: str = "kernel",
               took: int = 2, call_name: str = "cudaLaunchKernel", tid: int = 1, **arguments: Any) -> None:  # fmt: skip
        """A kernel, copy or set, and the call that launched it."""
        self.number += 1
        self.events.append(span("cuda_runtime", call_name, call, took, pid=1, tid=tid, correlation=self.number))
        self.events.append(kernel(name, start, duration, stream, category, correlation=self.number, **arguments))

    def span(self, category: str, name: str, start: int, duration: int, tid: int = 1, **arguments: Any) -> None:
        """Something on a thread."""
        self.events.append(span(category, name, start, duration, pid=1, tid=tid, **arguments))

    def step(self, number: int, start: int, duration: int) -> None:
        """A profiler step."""
        self.span("user_annotation", f"ProfilerStep#{number}", start, duration)


def message(
    collective: str, elements: int, group: str, size: int, sequence: int = -1, dtype: str = "Float", **more: Any
) -> dict[str, Any]:
    """The arguments NCCL's kernels carry."""
    told = {
        "Collective name": collective, "In msg nelems": elements, "Out msg nelems": elements, "Group size": size,
        "dtype": dtype, "Process Group Name": group,
    }  # fmt: skip
    return told | ({"Seq": sequence} if sequence >= 0 else {}) | more


def explained(folder: Path, ranks: Mapping[int, tuple[str, Sequence[str]]], peak: float = 0.0) -> Explanation:
    """Write, read and explain ranks: each has its member and its events."""
    profiles = [read(folder / f"rank-{rank}.json", text_of(events, before)) for rank, (before, events) in ranks.items()]
    activities = [activity_of(profile) for profile in profiles]
    return explain([Rank(activity, select_steps(activity)) for activity in activities], peak)


def moments(spans: Sequence[tuple[int, int]]) -> set[int]:
    """Every nanosecond in any of these, one by one."""
    return {moment for start, end in spans for moment in range(start, end)}
