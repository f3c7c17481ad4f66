"""Profiles for the tests: written as Kineto writes them, with any spelling of times; and strategies that make them up."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shardwise.trace.reading.read import read_profile

SPELLINGS = ("three", "fewest", "exponent", "many", "text")
BASES = (0, 75_548_353_325_031, 1_712_195_495_519_689_047, -4_000)
"""Nanoseconds that times are counted from: nothing, a base time's remainder, a date, before the beginning."""


def micro(ns: int, spelling: str = "three") -> str:
    """Nanoseconds as microseconds, in one of the ways that files have them."""
    value = Decimal(ns) / 1000
    if spelling == "three":
        return f"{value:.3f}"
    if spelling == "exponent":
        return f"{ns}E-3"
    if spelling == "many":
        return f"{value:.3f}0000"
    if spelling == "text":
        return f'"{value:.3f}"'
    return f"{value.normalize():f}"


def span(category: str, name: str, start: int, duration: int, *, pid: Any = 1, tid: Any = 1, spelling: str = "three",
         **arguments: Any) -> str:  # fmt: skip
    """One event as JSON."""
    return (
        f'{{"ph": "X", "cat": {json.dumps(category)}, "name": {json.dumps(name)}, "pid": {json.dumps(pid)}, '
        f'"tid": {json.dumps(tid)}, "ts": {micro(start, spelling)}, "dur": {micro(duration, spelling)}, '
        f'"args": {json.dumps(arguments)}}}'
    )


def kernel(name: str, start: int, duration: int, stream: int = 7, category: str = "kernel", **arguments: Any) -> str:
    """Something on a device."""
    return span(category, name, start, duration, pid=0, tid=stream, stream=stream, device=0, **arguments)


def step(number: int, start: int, duration: int) -> str:
    """A profiler step's range."""
    return span("user_annotation", f"ProfilerStep#{number}", start, duration)


def text_of(events: Sequence[str], before: str = "", after: str = "", separator: str = ",\n  ") -> bytes:
    """A whole file; `before` and `after` are members around the events, with their commas."""
    return (f'{{"schemaVersion": 1, {before}"traceEvents": [\n  ' + separator.join(events) + f"\n]{after}}}\n").encode()


def distributed(rank: int, world: int = 8) -> str:
    """The member that says the rank."""
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": list(range(world))},
              {"pg_name": "7", "pg_desc": "tensor", "pg_size": 2, "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}]  # fmt: skip
    info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": groups}
    return f'"distributedInfo": {json.dumps(info)}, '


def write(path: Path, text: bytes) -> Path:
    """Write a file, gzipped if its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, 1) if path.name.endswith(".gz") else text)
    return path


def read(path: Path, text: bytes) -> Any:
    """Write a file and read it."""
    return read_profile(write(path, text))


_NAMES = (
    "gemm",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    "void at::native::add<4>(int)",
    "Memcpy HtoD (Pinned -> Device)",
)
_OPERATORS = ("aten::mm", "aten::copy_", "c10d::allreduce_", "gloo:all_reduce", "shardwise:message tensor all_gather 64",
              "shardwise:module layers.0", "record_param_comms")  # fmt: skip


@st.composite
def device_events(draw: st.DrawFn) -> list[str]:
    """Kernels, copies and sets on a few streams, overlapping anyhow, with spans of the host around them."""
    base, spelling = draw(st.sampled_from(BASES)), draw(st.sampled_from(SPELLINGS))
    events = []
    for _ in range(draw(st.integers(1, 14))):
        category = draw(
            st.sampled_from(("kernel", "kernel", "Kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "gpu_user_annotation"))
        )
        start, duration = draw(st.integers(0, 150)), draw(st.integers(0, 60))
        known = draw(st.booleans()) and category == "kernel"
        more = {"Collective name": "allreduce", "Process Group Name": "0"} if known else {}
        events.append(kernel(draw(st.sampled_from(_NAMES)), base + start, duration, draw(st.integers(6, 8)), category,
                             spelling=spelling, **more))  # fmt: skip
    begin = 0
    for number in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 70))
        events.append(step(number, base + begin, length))
        begin += length + draw(st.integers(0, 3))
    return draw(st.permutations(events))


@st.composite
def host_events(draw: st.DrawFn) -> list[str]:
    """Operators and ranges on a few threads; they nest, or overlap anyhow."""
    base, spelling = draw(st.sampled_from(BASES)), draw(st.sampled_from(SPELLINGS))
    events = []
    for _ in range(draw(st.integers(1, 14))):
        category = draw(st.sampled_from(("cpu_op", "cpu_op", "Operator", "user_annotation", "python_function")))
        events.append(span(category, draw(st.sampled_from(_OPERATORS)), base + draw(st.integers(0, 80)), draw(st.integers(0, 60)),
                           tid=draw(st.integers(1, 2)), spelling=spelling))  # fmt: skip
    return events
