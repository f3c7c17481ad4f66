"""Profiles of other profilers, written again as PyTorch's would be: reports of Nsight Systems (`nsys export --type sqlite`), and
profiles of JAX and XLA (`*.trace.json.gz` or `*.xplane.pb`). The rest of the reader then knows nothing of them.

What they do not record is said: neither has shapes, process groups or sizes of messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.run.problems import UserError
from shardwise.trace.reading.foreign_rank import ForeignRank, NoReport
from shardwise.trace.reading.xla import PLANE, TRACE


class Translated(NamedTuple):
    """What to read instead of some given paths."""

    paths: list[Path]
    foreign: set[Path]
    """Files that are not PyTorch's, to be left out where a folder has them."""
    origins: dict[str, str]
    """Whose each written file is."""
    notes: list[str]
    """What the foreign profiles lack, and why some could not be read."""

    def original(self, text: str) -> str:
        """A sentence, about the files of the user instead of those written."""
        for target, origin in self.origins.items():
            text = text.replace(target, origin)
        return text


class _File(NamedTuple):
    path: Path
    named: bool
    """By the user, not found in a folder."""
    read: Callable[[Path], list[ForeignRank]]
    lacks: str


def translate(paths: Sequence[Path], folder: Path) -> Translated:
    """Write foreign profiles among these paths, and in folders among them, to a folder, as PyTorch would have. One found in a
    folder that cannot be read is noted; a database of another program there is nobody's mistake. A file of several ranks numbers
    them from 0, as the files of other nodes do, so the ranks of the next file follow those of the one before."""
    kept, files = _find(paths)
    planes = {file.path.name.removesuffix(PLANE) for file in files if file.path.name.endswith(PLANE)}
    begins: dict[str, int] = {}
    taken = 0
    origins: dict[str, str] = {}
    notes: list[str] = []
    once = {file.path.resolve(): file for file in sorted(files, key=lambda file: file.named)}
    for path, named, read, lacks in sorted(once.values(), key=lambda file: _numbered(file.path)):
        # A folder of JAX has each profile twice, and the planes have more of it.
        if not named and path.name.removesuffix(TRACE) in planes:
            continue
        try:
            ranks = read(path)
        except UserError as e:
            if named:
                raise
            notes += [] if isinstance(e, NoReport) else map(str, e.problems)
            continue
        begin = 0
        if ranks[0].rank is not None:
            # XLA names files by host: of two with one name, the second is another profile, not another node.
            host = path.name.removesuffix(PLANE).removesuffix(TRACE)
            begin = begins.setdefault(host if host != path.name else str(path), taken)
            taken = max(taken, begin + len(ranks))
        for found in ranks:
            rank = None if found.rank is None else found.rank + begin
            name = path.name.replace(".", "-") if rank is None else f"rank-{rank:05d}"
            target = folder / str(len(origins)) / f"{name}.json"
            target.parent.mkdir()
            _write(target, found._replace(rank=rank))
            kept.append(target)
            origins[str(target)] = str(path)
        notes.append(f"{path}: {lacks}")
        if begin:
            notes.append(f"{path}: taken as another node of the same job: its ranks are numbered from {begin} on")
    return Translated(kept, {file.path for file in files}, origins, notes)


def _find(paths: Sequence[Path]) -> tuple[list[Path], list[_File]]:
    """Paths that may hold profiles of PyTorch; and the foreign profiles."""
    from shardwise.trace.reading import nsys, xla

    readers: tuple[tuple[Callable[[Path], bool], Callable[[Path], list[ForeignRank]], str], ...] = (
        (nsys.is_report, nsys.ranks, nsys.LACKS),
        (xla.is_profile, xla.ranks, xla.LACKS),
    )
    kept: list[Path] = []
    files: list[_File] = []
    for path in paths:
        whole = path.is_dir()
        inside = [p for p in path.rglob("*") if p.is_file()] if whole else [path]
        foreign = [_File(one, not whole, read, lacks) for one in inside for known, read, lacks in readers if known(one)]
        if whole or not foreign:
            kept.append(path)
        files += foreign
    return kept, files


def _numbered(path: Path) -> list[str | int]:
    """A path as texts and numbers in turn, by which node 2 comes before node 10."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"([0-9]+)", str(path)))]


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
