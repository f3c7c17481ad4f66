"""Finds the profiles of a job in files and folders and parses them in parallel, or takes them from the cache.

Any subset of ranks will do. What cannot be read is reported and left out; it is an error only when nothing is left.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shardwise.run.problems import Problem, UserError
from shardwise.trace.reading import cache
from shardwise.trace.reading.columns import Columns
from shardwise.trace.reading.foreign import Translated, translate
from shardwise.trace.reading.integers import NONE
from shardwise.trace.reading.profile import Device, Group, Profile
from shardwise.trace.reading.records import Problems, repair
from shardwise.trace.reading.text import Source, Text, text_size

_RANK_IN_NAME = re.compile(r"rank[-_ .]?(\d{1,7})(?!\d)", re.IGNORECASE)


class NoProfile(UserError):
    """Nothing of the file could be read."""


class NoEvents(NoProfile):
    """The file is JSON without a list of events, so not a profile."""


class _Header(msgspec.Struct):
    """The top-level members that are used, beside the events."""

    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    base: Any = msgspec.field(default=None, name="baseTimeNanoseconds")


class Rest(NamedTuple):
    """The second half of a file, parsed."""

    begin: int
    """Byte of the text where it begins."""
    columns: Columns
    tail: bytes


class SecondHalf(NamedTuple):
    """The second half of a file, which another process parses."""

    begin: int
    """It begins at the first event boundary at or after this byte of the text."""
    wait: Callable[[], Rest | None]


def read_profile(
    path: Path, progress: Callable[[int], None] | None = None, second_half: SecondHalf | None = None
) -> Profile:
    """Read one file. Raises `NoProfile` when no event could be parsed; other problems are recorded in the profile. `progress` is
    called with the bytes read so far. Another process may parse `second_half` at the same time."""
    problems = Problems(str(path))
    columns = Columns(problems)
    try:
        with Source(path, progress) as source:
            text = Text(source, problems)
            refusal = text.begin()
            if refusal:
                kind = NoEvents if text.is_other_json else NoProfile
                raise kind(Problem(f"{refusal}{': ' + source.problem if source.problem else ''}", where=str(path)))
            for position, records in text.records():
                columns.add(position, records)
                if second_half and text.position >= second_half.begin:
                    rest, second_half = second_half.wait(), None
                    if rest and rest.begin == text.position:
                        columns.absorb(rest.columns)
                        text.tail = rest.tail
                        break
    except OSError as e:
        raise NoProfile(Problem(f"cannot be read: {e.strerror or e}", where=str(path))) from None
    headers = _header(text.head, "before", problems), _header(text.tail, "after", problems)
    info = next((h.distributed for h in headers if isinstance(h.distributed, dict)), {})
    base = next((h.base for h in headers if isinstance(h.base, int) and abs(h.base) < 1 << 62), 0)
    devices = next((h.devices for h in headers if isinstance(h.devices, list) and h.devices), [])
    rank, known = _rank(info, path)
    events, comm_params, shapes, allocations = columns.finish()
    if not len(events):
        raise NoProfile(*(problems.sentences() or (f"{path}: holds no events",)))
    if events.of_kind("other").all():  # a timeline, such as that of a plan
        raise NoProfile(*problems.sentences(), f"{path}: holds events, but none that PyTorch's profiler writes")
    return Profile(
        rank=rank,
        world=_whole(info.get("world_size")),
        base=base,
        path=str(path),
        events=events,
        comm_params=comm_params,
        shapes=shapes,
        allocations=allocations,
        groups=_groups(info.get("pg_config")),
        devices=tuple(Device(_whole(d.get("id")), str(d.get("name", ""))) for d in devices if isinstance(d, dict)),
        rank_known=known,
        problems=problems.sentences(),
    )


def read_rest(path: Path, begin: int) -> Rest | None:
    """Parse a file from the first event boundary at or after this byte; None if there is none."""
    problems = Problems(str(path))
    columns = Columns(problems)
    with Source(path) as source:
        text = Text(source, problems)
        if text.begin() or not text.skip(begin):
            return None
        begin = text.position
        for position, records in text.records():
            columns.add(position, records)
    return Rest(begin, columns, text.tail)


def _header(text: bytes, where: str, problems: Problems) -> _Header:
    """The members before or after the events."""
    if not text:
        return _Header()
    for repaired in (bytes, repair):
        try:
            return msgspec.json.decode(repaired(text), type=_Header)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
    problems.add(f"the text {where} its events is not JSON, so rank, groups and devices in it are unknown")
    return _Header()


def _rank(info: dict[str, Any], path: Path) -> tuple[int, bool]:
    """The rank in the file, else in its name, else 0; and whether it is known."""
    rank = _whole(info.get("rank"))
    if rank >= 0:
        return rank, True
    found = _RANK_IN_NAME.findall(path.name)
    return (int(found[-1]), True) if found else (0, False)


def _whole(value: Any) -> int:
    """An integer that may be written as text; `NONE` for anything else."""
    if type(value) is not int:  # as hardly ever; a bool is none
        value = (
            int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10 else NONE
        )
    return value if 0 <= value < 1 << 31 else NONE


def _groups(config: Any) -> dict[str, Group]:
    """The process groups by name."""
    groups = {}
    for entry in config if isinstance(config, list) else []:
        if not isinstance(entry, dict):
            continue
        ranks = entry.get("ranks")
        known = list(map(_whole, ranks)) if isinstance(ranks, list) else []
        members = tuple(known) if NONE not in known else tuple(rank for rank in known if rank >= 0)
        size = _whole(entry.get("pg_size"))
        groups[str(entry.get("pg_name", ""))] = Group(
            str(entry.get("pg_desc") or ""), members, size if size >= 0 else len(members)
        )
    return groups


ENDINGS = (".json", ".json.gz")
_SPLIT_FROM = 1 << 26  # bytes of text

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total bytes of all files."""
Folders = Mapping[Path, Path | None]
"""Where each file is cached; None: nowhere."""


@dataclass(frozen=True)
class Opened:
    """Profiles sorted by rank, one for each rank, and what could not be read."""

    profiles: tuple[Profile, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """A file without a profile, and why."""

    problems: tuple[str, ...]
    other_json: bool = False
    """Valid JSON, but not a profile."""


@dataclass(frozen=True)
class File:
    """A file that may hold a profile."""

    path: Path
    named: bool
    """Named by the user, not found in a folder: it must be a profile."""


def open_profiles(paths: Sequence[Path], cache_folder: Path | None = None, progress: Progress | None = None) -> Opened:
    """Read every profile in these files and folders. Without `cache_folder` the cache is not used. Profiles of other profilers are
    read as they would be if PyTorch's had written them."""
    with tempfile.TemporaryDirectory(prefix="shardwise-trace-") as place:
        translated = translate([path for path in paths if path.exists()], Path(place))
        missing = [path for path in paths if not path.exists()]
        opened = _open(translated._replace(paths=[*missing, *translated.paths]), paths, cache_folder, progress)
    origins = translated.origins
    named = tuple(replace(each, path=origins.get(each.path, each.path)) for each in opened.profiles)
    return Opened(named, (*opened.problems, *translated.notes))


def _open(asked: Translated, given: Sequence[Path], cache_folder: Path | None, progress: Progress | None) -> Opened:
    files, problems = find_files(asked.paths)
    files = [file for file in files if file.path not in asked.foreign]
    profiles: list[Profile] = []
    for file, result in _results(files, asked, cache_folder, progress):
        if isinstance(result, Profile):
            profiles.append(result)
        elif file.named or not result.other_json:
            problems += result.problems
    if not profiles:
        none = f"{', '.join(map(str, given))}: no profile found (files ending in {' or '.join(ENDINGS)})"
        raise UserError(*map(asked.original, problems + asked.notes or [none]))
    by_rank, more = _one_per_rank(profiles)
    problems += [*more, *(p for profile in by_rank for p in profile.problems)]
    return Opened(by_rank, tuple(map(asked.original, problems)))


def find_files(paths: Sequence[Path]) -> tuple[list[File], list[str]]:
    """The files among these paths and in the folders among them, each once; and problems of paths."""
    files: dict[Path, File] = {}
    problems = []
    for path in paths:
        try:
            if path.is_dir():
                inside = sorted(p for p in path.rglob("*") if p.name.endswith(ENDINGS) and p.is_file())
                for one in inside:
                    files.setdefault(one.resolve(), File(one, named=False))
            elif path.exists():
                files[path.resolve()] = File(path, named=True)
            else:
                problems.append(f"{path}: there is no such file or folder")
        except OSError as e:
            problems.append(f"{path}: cannot be read: {e.strerror or e}")
    return list(files.values()), problems


def _results(
    files: list[File], asked: Translated, cached: Path | None, progress: Progress | None
) -> Iterator[tuple[File, Profile | Refused]]:
    """Each file with its profile, or why it has none, in order. Translated files are new each time and not cached."""
    results: dict[Path, Profile | Refused] = {}
    folders = {file.path: None if str(file.path) in asked.origins else cached for file in files}
    for path, folder in folders.items():
        if folder is not None and (found := cache.load(folder, path)) is not None:
            results[path] = found
    missing = [file.path for file in files if file.path not in results]
    workers = min(len(missing), _cores())
    if workers > 1:
        _read_in_parallel(results, missing, folders, workers, progress)
    else:
        _read_sequentially(results, missing, folders, progress)
    for file in files:
        yield file, results[file.path]


def _read_sequentially(
    results: dict[Path, Profile | Refused], paths: list[Path], folders: Folders, progress: Progress | None
) -> None:
    """Read files one after the other."""
    sizes = [_size(path) for path in paths]
    total, begun = sum(sizes), accumulate(sizes, initial=0)
    for path, before in zip(paths, begun, strict=False):

        def advance(done: int, before: int = before) -> None:
            if progress:
                progress(before + done, total)

        results[path] = _read(path, folders[path], advance, split=_cores() > 1)


def _read_in_parallel(
    results: dict[Path, Profile | Refused],
    paths: list[Path],
    folders: Folders,
    workers: int,
    progress: Progress | None,
) -> None:
    """Read files in a process pool, the largest first."""
    sizes = {path: _size(path) for path in paths}
    done, total = 0, sum(sizes.values())
    try:
        with _pool(workers) as pool:
            waiting = {pool.submit(_read, path, folders[path]): path for path in sorted(paths, key=lambda p: -sizes[p])}
            for future in as_completed(waiting):
                path = waiting.pop(future)
                results[path] = future.result()
                done += sizes[path]
                if progress:
                    progress(done, total)
    except BrokenProcessPool:
        lost = [path for path in paths if path not in results]
        gone = "reading it was stopped from outside (is there enough memory?)"
        results.update({path: Refused((f"{path}: {gone}",)) for path in lost})


def _read(
    path: Path, folder: Path | None, progress: Callable[[int], None] | None = None, split: bool = False
) -> Profile | Refused:
    """Read one file and cache it. With `split`, a second process parses the second half of a large file."""
    try:
        stamp = cache.stamp(path) if folder is not None else b""
        size = text_size(path) if split else 0
        if size < _SPLIT_FROM:
            profile = read_profile(path, progress)
        else:
            with _pool(1) as pool:
                rest = pool.submit(read_rest, path, size // 2)
                profile = read_profile(path, progress, SecondHalf(size // 2, lambda: _result(rest)))
    except NoProfile as e:
        return Refused(tuple(map(str, e.problems)), isinstance(e, NoEvents))
    except OSError as e:
        return Refused((f"{path}: cannot be read: {e.strerror or e}",))
    if folder is not None:
        cache.store(folder, profile, stamp)
    return profile


def _result(rest: Future[Rest | None]) -> Rest | None:
    """What the other process parsed; None if it failed, and this one parses the whole file."""
    try:
        return rest.result()
    except (BrokenProcessPool, OSError):
        return None


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that read, forked where possible: it takes a hundredth of the time of starting Python. This process may be a rank
    of a job that just ended, and a fork has none of its threads: the destructor of a process group that a fork collects as garbage
    waits for these forever. So what is here already is frozen, and forks do not collect it."""
    gc.freeze()
    try:
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        with ProcessPoolExecutor(workers, context) as pool:
            yield pool
    finally:
        gc.unfreeze()


def _one_per_rank(profiles: list[Profile]) -> tuple[tuple[Profile, ...], list[str]]:
    """Profiles sorted by rank. A profile without a rank gets an unused one; of two with the same rank the first is used."""
    by_rank: dict[int, Profile] = {}
    problems = []
    free = (n for n in range(len(profiles)) if n not in by_rank)
    for profile in sorted(profiles, key=lambda p: not p.rank_known):
        if profile.rank_known and profile.rank in by_rank:
            other = by_rank[profile.rank].path
            problems.append(f"{profile.path}: says it is rank {profile.rank}, as {other} does; it is left out")
            continue
        rank = profile.rank if profile.rank_known else next(free)
        by_rank[rank] = replace(profile, rank=rank)
    return tuple(by_rank[rank] for rank in sorted(by_rank)), problems


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
