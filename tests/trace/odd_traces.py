"""Odd but legal profiles, each with one thing that a usual profile has little of: steps, process groups, names, threads. Every
maker writes a profile of about as many events as asked for; `plain` is the usual one to compare with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Writer = Callable[[Path, int], None]

PER_RANK = 200
"""Events in each of the files of many ranks."""
RANK_COSTS = 1500
"""Events that one more rank may cost as much as: a file opened, a hundred small arrays, a row in every table."""


def span(category: str, name: str, start: int, duration: int, tid: int = 1, arguments: str = "", pid: int = 1) -> str:
    """One event; times in nanoseconds."""
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": {pid}, "tid": {tid}, '
        f'"ts": {start // 1000}.{start % 1000:03d}, "dur": {duration // 1000}.{duration % 1000:03d}, "args": {{{arguments}}}}}'
    )


def kernel(name: str, start: int, duration: int, number: int, stream: int = 7, more: str = "") -> str:
    """A kernel of launch `number`."""
    arguments = f'"device": 0, "stream": {stream}, "correlation": {number}{more}'
    return span("kernel", name, start, duration, stream, arguments, 0)


def launch(start: int, number: int, tid: int = 1) -> str:
    """The call that launches kernel `number`."""
    return span(
        "cuda_runtime", "cudaLaunchKernel", start, 400, tid, f'"External id": {number}, "correlation": {number}'
    )


def operator(
    name: str, start: int, duration: int, number: int, tid: int = 1, dims: str = "[[64, 64], [64, 64]]"
) -> str:
    """An operator with shapes."""
    return span(
        "cpu_op", name, start, duration, tid,
        f'"External id": {number}, "Sequence number": {number}, "Input type": ["float", "float"], "Input Dims": {dims}',
    )  # fmt: skip


def step(number: int, start: int, duration: int) -> str:
    """A profiler step."""
    return span("user_annotation", f"ProfilerStep#{number}", start, duration)


def write(path: Path, events: Iterator[str] | list[str], before: str = "") -> None:
    """Write a file; `before` are members before the events."""
    devices = '"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]'
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"schemaVersion": 1, {devices}, {before}"traceEvents": [\n')
        file.write(",\n".join(events))
        file.write("\n]}\n")


def launched(
    at: int, number: int, name: str = "", dims: str = "[[64, 64], [64, 64]]", stream: int = 7, tid: int = 1
) -> list[str]:
    """An operator, its launch and its kernel, within two microseconds."""
    return [
        operator("aten::mm", at, 1500, number, tid, dims),
        launch(at + 100, number, tid),
        kernel(name or f"gemm_{number % 40}", at + 700, 1100, number, stream),
    ]


def in_steps(rows: list[str], length: int, steps: int = 8) -> list[str]:
    """Events that last from 0 to `length`, in some profiler steps."""
    return rows + [step(number, number * length // steps, length // steps) for number in range(steps)]


def plain(folder: Path, count: int) -> None:
    """A usual profile: few names, two threads' worth of depth, three streams, eight steps."""
    rows: list[str] = []
    for number in range(count // 4):
        at = 2000 * number
        rows += launched(at, number, stream=7 if number % 9 else 9)
        rows.append(span("user_annotation", f"layers.{number % 24}", at, 1800))
    write(folder / "rank-0.json", in_steps(rows, 2000 * (count // 4)))


def many_steps(folder: Path, count: int) -> None:
    """A profiler step for every kernel."""
    rows: list[str] = []
    for number in range(count // 4):
        rows += [step(number, 2000 * number, 2000), *launched(2000 * number, number)]
    write(folder / "rank-0.json", rows)


def many_groups(folder: Path, count: int) -> None:
    """Every collective has a process group of its own, half of them with a description; the file's list of groups counts, too."""
    rows: list[str] = []
    groups = []
    for number in range(count // 3):
        name = f"group {number} of experts" if number % 2 else "undefined"
        told = (
            f', "Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "Group size": 2, "dtype": "Float", '
            f'"Process Group Name": "{number}", "Process Group Description": "{name}", "Seq": {number}'
        )
        rows += [
            launch(2000 * number, number),
            kernel("ncclDevKernel_AllReduce", 2000 * number + 600, 900, number, 9, told),
        ]
        groups.append({"pg_name": str(number), "pg_desc": name, "pg_size": 2, "ranks": [0, 1 + number]})
    info = {"backend": "nccl", "rank": 0, "world_size": count, "pg_config": groups}
    write(folder / "rank-0.json", in_steps(rows, 2000 * (count // 3)), f'"distributedInfo": {json.dumps(info)}, ')


def many_names(folder: Path, count: int) -> None:
    """Every kernel, operator and range has a name of its own."""
    rows: list[str] = []
    for number in range(count // 4):
        at, long = 2000 * number, f"void at::native::elementwise_kernel<{number}, at::native::Functor<float>>(int)"
        rows += [
            *launched(at, number, long),
            span("cpu_op" if number % 2 else "user_annotation", f"my_op_{number}", at, 1800),
        ]
    write(folder / "rank-0.json", in_steps(rows, 500 * count))


def many_tracks(folder: Path, count: int) -> None:
    """Every operator has a thread, every kernel a stream, of its own."""
    rows: list[str] = []
    for number in range(count // 3):
        rows += launched(2000 * number, number, stream=number + 10, tid=number + 10)
    write(folder / "rank-0.json", in_steps(rows, 2000 * (count // 3)))


def deep(folder: Path, count: int) -> None:
    """Operators, ranges and Python frames nested as deep as they are many."""
    depth, rows = count // 5, []
    for number in range(depth):
        length = 10 * (depth - number) + 2000
        rows += [
            span("python_function", f"nn.Module: Block_{number % 5}", 5 * number, length, 1),
            operator("aten::mm", 5 * number, length, number, 2),
            span("user_annotation", f"part {number % 7}", 5 * number, length, 3),
            launch(5 * number + 1, number, 1 + number % 3),
            kernel("gemm", 5 * number + 10, 4, number),
        ]
    write(folder / "rank-0.json", in_steps(rows, 10 * depth + 2000))


def empty(folder: Path, count: int) -> None:
    """Events with nothing in them, or with nothing but what must be there."""
    rows = [*launched(0, 1), step(1, 0, 4000)]
    rows += ["{}", '{"ph": "X", "name": "", "ts": 0}', '{"ph": "X", "name": "", "ts": 1, "dur": 0, "args": {}}'] * (
        count // 3
    )
    write(folder / "rank-0.json", rows)


def many_ranks(folder: Path, count: int) -> None:
    """As many ranks as there are handfuls of events, which meet in collectives."""
    world = max(count // PER_RANK, 2)
    for rank in range(world):
        rows: list[str] = []
        for number in range(PER_RANK // 4 - 2):
            at = 4000 * number + 10 * (rank % 7)
            told = (
                f', "Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "Group size": {world}, '
                f'"dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg", "Seq": {number}'
            )
            rows += [
                *launched(at, 2 * number),
                kernel("ncclDevKernel_AllReduce", at + 1900, 4000 * number + 3900 - at - 1900, 2 * number + 1, 9, told),
            ]
        info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": []}
        write(
            folder / f"rank-{rank}.json",
            in_steps(rows, 4000 * (PER_RANK // 4), 4),
            f'"distributedInfo": {json.dumps(info)}, ',
        )


def many_shapes(folder: Path, count: int) -> None:
    """Every operator has shapes of its own."""
    rows: list[str] = []
    for number in range(count // 3):
        rows += launched(2000 * number, number, dims=f"[[{number + 1}, 64], [64, {number % 97 + 1}]]")
    write(folder / "rank-0.json", in_steps(rows, 2000 * (count // 3)))


def zero_length(folder: Path, count: int) -> None:
    """Events without a duration, many of them at the same moment."""
    rows: list[str] = []
    for number in range(count // 3):
        at = number // 10 * 1000
        rows += [operator("aten::mm", at, 0, number), launch(at, number), kernel(f"gemm_{number % 40}", at, 0, number)]
    write(folder / "rank-0.json", in_steps([*rows, *launched(500, count)], count // 30 * 1000 + 3000))


def overlapping(folder: Path, count: int) -> None:
    """Kernels of one stream and operators of one thread that overlap without nesting, thousands at a time."""
    rows: list[str] = []
    for number in range(count // 3):
        at = 100 * number
        rows += [
            operator("aten::mm", at, 40 * count // 3, number),
            launch(at, number),
            kernel(f"gemm_{number % 40}", at + 50, 50 * count // 3, number),
        ]
    write(folder / "rank-0.json", in_steps(rows, 100 * count))


def huge_arguments(folder: Path, count: int) -> None:
    """One event in two thousand has a megabyte of arguments."""
    stack = json.dumps([f"frame {number}: (model.py) {{" for number in range(30_000)])
    rows: list[str] = []
    for number in range(count // 4):
        rows += launched(2000 * number, number)
        rows.append(
            span("cpu_op", "aten::add", 2000 * number, 1600, 1, f'"Stack": {stack}' if number % 500 == 250 else "")
        )
    write(folder / "rank-0.json", in_steps(rows, 500 * count))


def unsorted(folder: Path, count: int) -> None:
    """The usual profile with its events in any order."""
    rows: list[str] = []
    for number in range(count // 3):
        rows += launched(2000 * number, number)
    rows = in_steps(rows, 2000 * (count // 3))
    random.Random(7).shuffle(rows)
    write(folder / "rank-0.json", rows)


ODD: tuple[Writer, ...] = (
    many_steps, many_groups, many_names, many_tracks, deep, empty, many_ranks, many_shapes, zero_length, overlapping,
    huge_arguments, unsorted,
)  # fmt: skip
