"""Profiles of other profilers, written again as PyTorch's would be: reports of Nsight Systems (`nsys export --type sqlite`), and
profiles of JAX and XLA (`*.trace.json.gz` or `*.xplane.pb`). The rest of the reader then knows nothing of them.

What they do not record is said: neither has shapes, process groups or sizes of messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.trace.reading.foreign_rank import ForeignRank


class Translated(NamedTuple):
    """Paths to read instead of some given ones, whose each is, and what the foreign profiles lack."""

    paths: list[Path]
    origins: dict[str, str]
    notes: list[str]


def translate(paths: Sequence[Path], folder: Path) -> Translated:
    """Write foreign profiles among these paths, and in folders among them, to a folder, as PyTorch would have."""
    from shardwise.trace.reading import nsys, xla

    readers: tuple[tuple[Callable[[Path], bool], Callable[[Path], list[ForeignRank]], str], ...] = (
        (nsys.is_report, nsys.ranks, nsys.LACKS),
        (xla.is_profile, xla.ranks, xla.LACKS),
    )
    kept: list[Path] = []
    origins: dict[str, str] = {}
    notes: list[str] = []
    for number, path in enumerate(paths):
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        foreign = [(one, read, lacks) for one in inside for known, read, lacks in readers if known(one)]
        if not foreign:
            kept.append(path)
            continue
        # A folder of JAX has each profile twice, and the planes have more of it.
        planes = {one.name.removesuffix(xla.PLANE) for one, _, _ in foreign if one.name.endswith(xla.PLANE)}
        foreign = [each for each in foreign if each[0].name.removesuffix(xla.TRACE) not in planes]
        others = {one for one, _, _ in foreign}
        kept += [
            p
            for p in inside
            if path.is_dir() and p.name.endswith((".json", ".json.gz")) and not xla.is_profile(p) and p not in others
        ]
        for one, read, lacks in foreign:
            for found in read(one):
                rank = f"rank-{found.rank:05d}" if found.rank is not None else one.name.replace(".", "-")
                target = folder / f"{number}-{len(origins)}" / f"{rank}.json"
                target.parent.mkdir()
                _write(target, found)
                kept.append(target)
                origins[str(target)] = str(one)
            notes.append(f"{one}: {lacks}")
    return Translated(kept, origins, notes)


def _write(target: Path, found: ForeignRank) -> None:
    """As Kineto writes it: microseconds with three digits, one event a line."""
    with target.open("w", encoding="utf-8") as file:
        info = {"distributedInfo": {"rank": found.rank}} if found.rank is not None else {}
        head = {"schemaVersion": 1, "deviceProperties": found.devices, **info}
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [')
        for number, span in enumerate(found.spans):
            length = max(span.end - span.start, 0)
            event = (
                f'{{"ph": "X", "cat": "{span.category}", "name": {json.dumps(span.name)}, "pid": {span.process}, '
                f'"tid": {span.thread}, "ts": {_micro(span.start)}, "dur": {_micro(length)}, "args": {json.dumps(span.arguments)}}}'
            )
            file.write((",\n" if number else "\n") + event)
        file.write("\n]}\n")


def _micro(nanoseconds: int) -> str:
    sign, value = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    return f"{sign}{value // 1000}.{value % 1000:03d}"
