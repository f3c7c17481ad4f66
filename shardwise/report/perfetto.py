"""Timelines as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing: a process for each timeline and pipeline rank,
a thread for each stream.

The format uses decimal microseconds. Times are rounded to integer nanoseconds once and written with three decimals, so no precision
is lost and adjacent spans stay adjacent.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwise.ledger import Span, Timeline
from shardwise.report.pick import nanoseconds, non_overlapping, pass_of, streams_of

# Colour names of chrome://tracing; Perfetto chooses colours by span name.
CNAME = {
    "matmul": "thread_state_running",
    "attention": "rail_animation",
    "memory": "thread_state_runnable",
    "host": "heap_dump_stack_frame",
    "replicate": "vsync_highlight_color",
    "shard": "thread_state_iowait",
    "context": "good",
    "tensor": "terrible",
    "expert": "olive",
    "pipeline": "detailed_memory_dump",
    "offload": "bad",
    "bubble": "grey",
    "optimizer": "rail_response",
    "data": "yellow",
    "checkpoint": "black",
    "other": "generic_work",
}

_BACKWARD = "bad"
"""Colour of backward passes, to tell them from forward passes of the same category."""


def chrome_trace(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    """The JSON in chunks, one line per event; a process is named by its timeline and rank."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    first = True
    for event in _events(timelines):
        yield event if first else ",\n" + event
        first = False
    yield "\n]}\n"


def write_chrome_trace(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write the trace to a file; gzipped if its name ends in .gz, which Perfetto opens directly."""
    opened = gzip.open if Path(path).suffix == ".gz" else open
    try:
        with opened(path, "wt", encoding="utf-8") as file:
            file.writelines(chrome_trace(timelines))
    except OSError as e:
        e.filename = e.filename or str(path)  # the error of a full disk does not name the file
        raise


def _events(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    process = 0
    for name, timeline in timelines.items():
        by_rank: dict[int, list[Span]] = {rank: [] for rank in sorted({span.rank for span in timeline.spans})}
        for span in timeline.spans:
            by_rank[span.rank].append(span)
        for rank, spans in by_rank.items():
            process += 1
            title = f"{name} {rank}".strip()
            yield _metadata(process, "process_name", name=title)
            yield _metadata(process, "process_sort_index", sort_index=process)
            yield from _streams(process, spans)


def _streams(process: int, spans: list[Span]) -> Iterator[str]:
    thread = 0
    for stream in streams_of(spans):
        # The format requires events of a thread to nest, so overlapping ones go to further threads.
        for at, row in enumerate(non_overlapping(span for span in spans if span.stream == stream)):
            thread += 1
            yield _metadata(process, "thread_name", thread, name=stream if at == 0 else f"{stream} ({at + 1})")
            yield _metadata(process, "thread_sort_index", thread, sort_index=thread)
            for span in row:
                yield _event(process, thread, span)


def _event(process: int, thread: int, span: Span) -> str:
    start, end = nanoseconds(span)
    known = {"microbatch": span.microbatch, "stage": span.stage}
    back = pass_of(span).startswith("backward")
    head = {"name": span.name, "cat": span.category, "ph": "X", "pid": process, "tid": thread}
    tail = {
        "cname": _BACKWARD if back else CNAME.get(span.category, CNAME["other"]),
        "args": {key: value for key, value in known.items() if value >= 0},
    }
    times = f'"ts": {_microseconds(start)}, "dur": {_microseconds(end - start)}'
    return f"{json.dumps(head)[:-1]}, {times}, {json.dumps(tail)[1:]}"


def _metadata(process: int, kind: str, thread: int = 0, **args: str | int) -> str:
    return json.dumps({"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args})


def _microseconds(nanoseconds: int) -> str:
    sign = "-" if nanoseconds < 0 else ""
    whole, part = divmod(abs(nanoseconds), 1000)
    return f"{sign}{whole}.{part:03d}"
