"""Profiles of other profilers, written again as PyTorch's would be: reports of Nsight Systems (`nsys export --type sqlite`), and
profiles of JAX and XLA (`*.trace.json.gz` or `*.xplane.pb`). The rest of the reader then knows nothing of them.

What they do not record is said: neither has shapes, process groups or sizes of messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.run.problems import UserError
from shardwise.trace.reading.foreign_rank import ForeignRank, NoReport


class Translated(NamedTuple):
    """What to read instead of some given paths."""

    paths: list[Path]
    foreign: set[Path]
    """Files that are not PyTorch's, to be left out where a folder has them."""
    origins: dict[str, str]
    """Whose each written file is."""
    notes: list[str]
    """What the foreign profiles lack, and why some could not be read."""


def translate(paths: Sequence[Path], folder: Path) -> Translated:
    """Write foreign profiles among these paths, and in folders among them, to a folder, as PyTorch would have. One found in a
    folder that cannot be read is noted; a database of another program there is nobody's mistake."""
    from shardwise.trace.reading import nsys, xla

    readers: tuple[tuple[Callable[[Path], bool], Callable[[Path], list[ForeignRank]], str], ...] = (
        (nsys.is_report, nsys.ranks, nsys.LACKS),
        (xla.is_profile, xla.ranks, xla.LACKS),
    )
    kept: list[Path] = []
    others: set[Path] = set()
    origins: dict[str, str] = {}
    notes: list[str] = []
    for number, path in enumerate(paths):
        whole = path.is_dir()
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if whole else [path]
        foreign = [(one, read, lacks) for one in inside for known, read, lacks in readers if known(one)]
        others.update(one for one, _, _ in foreign)
        if whole or not foreign:
            kept.append(path)
        # A folder of JAX has each profile twice, and the planes have more of it.
        planes = {one.name.removesuffix(xla.PLANE) for one, _, _ in foreign if one.name.endswith(xla.PLANE)}
        for one, read, lacks in foreign:
            if one.name.removesuffix(xla.TRACE) in planes:
                continue
            try:
                ranks = read(one)
            except UserError as e:
                if not whole:
                    raise
                notes += [] if isinstance(e, NoReport) else map(str, e.problems)
                continue
            for found in ranks:
                rank = f"rank-{found.rank:05d}" if found.rank is not None else one.name.replace(".", "-")
                target = folder / f"{number}-{len(origins)}" / f"{rank}.json"
                target.parent.mkdir()
                _write(target, found)
                kept.append(target)
                origins[str(target)] = str(one)
            notes.append(f"{one}: {lacks}")
    return Translated(kept, others, origins, notes)


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
