"""Reports of Nsight Systems, exported with `nsys export --type sqlite`: kernels, copies, runtime calls and NVTX ranges of each
process.

NVTX ranges are annotations; those of `torch.autograd.profiler.emit_nvtx` are operators, and ranges such as `step 3` are steps.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from shardwise.run.problems import Problem
from shardwise.trace.reading.foreign_rank import SQLITE, ForeignRank, NoReport, Span, refused

LACKS = (
    "Nsight Systems records no shapes, sizes of messages or process groups: "
    "FLOPs, MFU, bandwidths and axes of collectives are unknown"
)
COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""CUPTI's kinds of copies."""
RANGES = (59, 60)
"""NVTX's ranges: pushed and popped, started and ended."""
_STEP = re.compile(r"(?:profiler ?step|train(?:ing)?[ _]?step|step|iteration|iter)[ _#:=]*(\d+)", re.IGNORECASE)
_OPERATOR = re.compile(r"((?:aten|c10d|torch|autograd)::[^,\s]+)")
_VERSION = re.compile(r"_v\d+$")


def is_report(path: Path) -> bool:
    """Whether this is a database that nsys wrote."""
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def ranks(path: Path) -> list[ForeignRank]:
    """The processes of a report that used a device, by the first device of each."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as base:
            tables = {row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
            if "StringIds" not in tables or not any(name.startswith("CUPTI_ACTIVITY") for name in tables):
                why = (
                    "is a database, but not a report of Nsight Systems with CUDA's activity (nsys export --type sqlite)"
                )
                raise NoReport(Problem(why, where=str(path)))
            names = dict(base.execute("SELECT id, value FROM StringIds"))
            listed = _rows(base, "TARGET_INFO_GPU", {"id": "0", "name": "''"})
            devices = [{"id": number, "name": name} for number, name in listed]
            spans: dict[int, list[Span]] = {}
            first: dict[int, int] = {}
            for process, span in _device_spans(base, names):
                spans.setdefault(process, []).append(span)
                first[process] = min(first.get(process, 1 << 30), span.process)
            for process, span in _host_spans(base, names):
                if process in spans:
                    spans[process].append(span)
    except sqlite3.Error as e:
        raise refused(path, f"cannot be read as a report of Nsight Systems: {e}") from None
    if not spans:
        raise refused(path, "holds nothing that ran on a device")
    order = sorted(spans, key=lambda process: (first[process], process))
    one = len(order) == 1
    return [ForeignRank(iter(spans[process]), devices, None if one else rank) for rank, process in enumerate(order)]


def _rows(base: sqlite3.Connection, table: str, wanted: dict[str, str]) -> Iterator[tuple[Any, ...]]:
    """Rows of a table, if the report has it; a column that this version does not have is its default."""
    there = {row[1] for row in base.execute(f"PRAGMA table_info({table})")}
    columns = [f'"{name}"' if name in there else f"{default} AS {name}" for name, default in wanted.items()]
    if there:
        yield from base.execute(f"SELECT {', '.join(columns)} FROM {table}")


def _process(identifier: int) -> int:
    """The process in the identifiers that nsys gives to processes and threads."""
    return identifier >> 24 & 0xFFFFFF


def _device_spans(base: sqlite3.Connection, names: dict[int, str]) -> Iterator[tuple[int, Span]]:
    common = dict.fromkeys(("start", "end", "deviceId", "streamId", "correlationId", "globalPid"), "0")
    wanted = common | {"demangledName": "NULL", "shortName": "NULL"}
    for *place, long, short in _rows(base, "CUPTI_ACTIVITY_KIND_KERNEL", wanted):
        yield _on_device("kernel", names.get(long) or names.get(short) or "kernel", *place)
    for *place, size, kind in _rows(base, "CUPTI_ACTIVITY_KIND_MEMCPY", common | {"bytes": "0", "copyKind": "0"}):
        yield _on_device("gpu_memcpy", f"Memcpy {COPIES.get(kind, '')}".strip(), *place, bytes=size)
    for *place, size in _rows(base, "CUPTI_ACTIVITY_KIND_MEMSET", common | {"bytes": "0"}):
        yield _on_device("gpu_memset", "Memset", *place, bytes=size)
    # By default nsys records a CUDA graph as a whole, without its kernels; where the times were not collected, both are 0.
    for *place, graph in _rows(base, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", common | {"graphId": "0"}):
        if place[1]:
            yield _on_device("kernel", f"CUDA graph {graph}", *place)


def _on_device(
    category: str, name: str, start: int, end: int, device: int, stream: int, number: int, process: int, **more: Any
) -> tuple[int, Span]:
    arguments = {"device": device, "stream": stream, "correlation": number, **more}
    return _process(process), Span(category, name, start, end, device, stream, arguments)


def _host_spans(base: sqlite3.Connection, names: dict[int, str]) -> Iterator[tuple[int, Span]]:
    wanted = {"start": "0", "end": "0", "globalTid": "0", "correlationId": "0", "nameId": "NULL"}
    for start, end, thread, number, name in _rows(base, "CUPTI_ACTIVITY_KIND_RUNTIME", wanted):
        called = _VERSION.sub("", names.get(name, "call"))
        category = "cuda_driver" if called.startswith("cu") and not called.startswith("cuda") else "cuda_runtime"
        process = _process(thread)
        yield process, Span(category, called, start, end, process, thread & 0xFFFFFF, {"correlation": number})
    wanted = {"start": "0", "end": "NULL", "eventType": "59", "text": "NULL", "textId": "NULL", "globalTid": "0"}
    for start, end, kind, text, identifier, thread in _rows(base, "NVTX_EVENTS", wanted):
        said = text or names.get(identifier)
        if kind in RANGES and end is not None and said:
            process = _process(thread)
            yield process, Span(*_annotation(said), start, end, process, thread & 0xFFFFFF, {})


def _annotation(text: str) -> tuple[str, str]:
    """Category and name of an NVTX range: an operator, a step, or anything that a program names."""
    if found := _OPERATOR.match(text):
        return "cpu_op", found[1]
    found = _STEP.fullmatch(text.strip())
    return "user_annotation", f"ProfilerStep#{found[1]}" if found else text
