"""Profiles of JAX and XLA: the Chrome trace (`*.trace.json.gz`) or the planes (`*.xplane.pb`) that `jax.profiler` writes, a rank
for each device.

A device's plane has lines: on GPUs its streams, on TPUs "XLA Ops" and what runs beside them. Lines that group these again (modules,
steps, name scopes) are not work. The planes are a protobuf of few fields, read here without its library, which nothing else needs.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.trace.reading.foreign_rank import ForeignRank, Span, refused

LACKS = (
    "XLA records no shapes, sizes of messages or links between launches and kernels: "
    "FLOPs, MFU, bandwidths and why a device was idle are unknown"
)
TRACE, PLANE = ".trace.json.gz", ".xplane.pb"
_DEVICE = re.compile(r"/device:(GPU|TPU|CUSTOM)[^:]*:(\d+)")
_STREAM = re.compile(r"Stream #(\d+)")
_WORK = ("XLA Ops", "Async XLA Ops")
_COPY = re.compile(r"memcpy|memcpyd2h|copy-(?:start|done)|infeed|outfeed", re.IGNORECASE)
_CONTROL = re.compile(r"%?(?:while|conditional|call)\b")
_COLLECTIVES = {"all-reduce": "AllReduce", "all-gather": "AllGather", "reduce-scatter": "ReduceScatter", "all-to-all": "AllToAll",
                "collective-permute": "SendRecv", "collective-broadcast": "Broadcast"}  # fmt: skip


class Line(NamedTuple):
    """A line of a device's plane."""

    name: str
    number: int
    events: list[tuple[str, int, int]]
    """Name, start and end, in nanoseconds."""


def is_profile(path: Path) -> bool:
    """Whether JAX's profiler wrote this. PyTorch's files may have the same ending."""
    if path.name.endswith(PLANE):
        return path.is_file()
    if not path.name.endswith(TRACE) or not path.is_file():
        return False
    try:
        with gzip.open(path) as file:
            begin = file.read(1 << 16)
    except (OSError, EOFError, zlib.error):
        return False
    return b"schemaVersion" not in begin and (b"highres-ticks" in begin or b"/device:" in begin)


def ranks(path: Path) -> list[ForeignRank]:
    """The devices of a profile."""
    try:
        planes = _from_planes(path) if path.name.endswith(PLANE) else _from_trace(path)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, IndexError,
            RecursionError) as e:  # fmt: skip
        raise refused(path, f"cannot be read as a profile of XLA: {e}") from None
    found = []
    devices = [(int(device[2]), name) for name in planes if (device := _DEVICE.search(name)) is not None]
    for number, name in sorted(devices):
        spans = list(_spans(planes[name], number))
        if spans:
            found.append((number, name, spans))
    if not found:
        raise refused(path, "is a profile of XLA without a device: JAX on a CPU records none")
    one = len(found) == 1
    return [ForeignRank(iter(spans), [{"id": number, "name": name}], None if one else rank)
            for rank, (number, name, spans) in enumerate(found)]  # fmt: skip


def _spans(lines: list[Line], device: int) -> Iterator[Span]:
    streams = any(_STREAM.match(line.name) for line in lines)
    for at, line in enumerate(lines):
        if line.name == "Steps":
            for name, start, end in line.events:
                if number := re.search(r"\d+", name):
                    yield Span("user_annotation", f"ProfilerStep#{number[0]}", start, end, 1, 1, {})
            continue
        stream = _STREAM.match(line.name)
        if not (stream if streams else line.name in _WORK):
            continue
        thread = int(stream[1]) if stream else at
        for name, start, end in line.events if streams else _without_loops(line.events):
            category = "gpu_memcpy" if _COPY.search(name) and not _collective(name) else "kernel"
            yield Span(
                category, _collective(name) or name, start, end, device, thread, {"device": device, "stream": thread}
            )


def _without_loops(events: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The events of a line without loops and branches that enclose others: their time is that of the operations inside."""
    inner = sorted((event for event in events if event[2] > event[1]), key=lambda event: (event[1], -event[2]))
    loops = {outer for outer, after in pairwise(inner) if _CONTROL.match(outer[0]) and outer[1] <= after[1] < outer[2]}
    return [event for event in events if event not in loops]


def _collective(name: str) -> str:
    """XLA's name of a collective, as NCCL's kernels are called; empty for anything else."""
    for word, called in _COLLECTIVES.items():
        if name.startswith(word):
            return f"ncclDevKernel_{called} {name}"
    return ""


def _from_trace(path: Path) -> dict[str, list[Line]]:
    """The lines of each device of a Chrome trace; times there are microseconds."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    processes = {e["pid"]: str(e["args"]["name"]) for e in named if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): str(e["args"]["name"]) for e in named if e.get("name") == "thread_name"}
    lines: dict[tuple[int, int], Line] = {}
    for event in events:
        if event.get("ph") != "X" or "/device:" not in processes.get(event["pid"], ""):
            continue
        place = event["pid"], event["tid"]
        line = lines.setdefault(place, Line(threads.get(place, ""), place[1], []))
        start = round(float(event["ts"]) * 1000)
        line.events.append((str(event["name"]), start, start + round(float(event.get("dur", 0)) * 1000)))
    found: dict[str, list[Line]] = {}
    for (process, _), line in sorted(lines.items()):
        found.setdefault(processes[process], []).append(line)
    return found


def _from_planes(path: Path) -> dict[str, list[Line]]:
    """The lines of each plane; fields by their numbers in xplane.proto."""
    found: dict[str, list[Line]] = {}
    for field, plane in _fields(path.read_bytes()):
        if field != 1:
            continue
        inside = list(_fields(plane))
        name = next((_text(value) for number, value in inside if number == 2), "")
        if "/device:" not in name:
            continue
        names = {}
        for number, value in inside:
            if number == 4:  # an entry of the map from numbers to what events are called
                entry = dict(_fields(value))
                meta = dict(_fields(entry.get(2, b"")))
                names[entry.get(1, meta.get(1, 0))] = _text(meta.get(4) or meta.get(2, b""))
        found[name] = [_line(value, names) for number, value in inside if number == 3]
    return found


def _line(text: bytes, names: dict[Any, str]) -> Line:
    fields = list(_fields(text))
    plain = {number: value for number, value in fields if number != 4}
    began = plain.get(3, 0)
    events = []
    for number, value in fields:
        if number == 4:
            event = dict(_fields(value))
            start = began + event.get(2, 0) // 1000
            events.append((names.get(event.get(1, 0), "?"), start, start + event.get(3, 0) // 1000))
    return Line(_text(plain.get(11) or plain.get(2, b"")), plain.get(1, 0), events)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _fields(text: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: number, and a whole number or the bytes of it."""
    at, size = 0, len(text)
    while at < size:
        key, at = _varint(text, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(text, at)
            yield number, value
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            length, at = _varint(text, at)
            if at + length > size:
                raise ValueError("it ends too early")
            yield number, text[at : at + length]
            at += length
        else:
            raise ValueError(f"it has a field of kind {kind}, which no protobuf of today has")


def _varint(text: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(text) or shift > 63:
            raise ValueError("it ends too early")
        byte = text[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value - (1 << 64) if value >= 1 << 63 else value), at
        shift += 7
