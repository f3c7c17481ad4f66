"""Finds the profiles of a job in files and folders and reads them all, several at a time, from the cache where it has them.

Any subset of ranks will do. What cannot be read is said and left out; only when nothing is left is that an error.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from pathlib import Path

from shardwise.run.problems import UserError
from shardwise.trace.reading import cache
from shardwise.trace.reading.events import Profile
from shardwise.trace.reading.parse import NoEvents, NoProfile, Rest, SecondHalf, read_profile, read_rest
from shardwise.trace.reading.source import text_size

ENDINGS = (".json", ".json.gz")
_WORTH_SHARING = 1 << 26  # bytes of text

Told = Callable[[int, int], None]
"""Is told how many bytes of the files are read, and how many there are."""


@dataclass(frozen=True)
class Opened:
    """Profiles in the order of their ranks, no rank twice, and what could not be read."""

    profiles: tuple[Profile, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """Why a file gave no profile."""

    problems: tuple[str, ...]
    other_json: bool = False
    """It is JSON of another kind."""


@dataclass(frozen=True)
class File:
    """A file that may hold a profile."""

    path: Path
    named: bool
    """Whether the user named it, rather than a folder it is in: then it has to be a profile."""


def open_profiles(paths: Sequence[Path], cache_folder: Path | None = None, told: Told | None = None) -> Opened:
    """Read every profile that the paths name or hold. Without a folder for the cache nothing is kept or looked up."""
    files, problems = find_files(paths)
    profiles: list[Profile] = []
    for file, result in _results(files, cache_folder, told):
        if isinstance(result, Profile):
            profiles.append(result)
        elif file.named or not result.other_json:
            problems += result.problems
    if not profiles:
        raise UserError(
            *(problems or [f"{', '.join(map(str, paths))}: no profile found (files ending in {' or '.join(ENDINGS)})"])
        )
    chosen, more = _one_a_rank(profiles)
    return Opened(chosen, (*problems, *more, *(p for profile in chosen for p in profile.problems)))


def find_files(paths: Sequence[Path]) -> tuple[list[File], list[str]]:
    """The files that paths name, and those in the folders they name, each once; and paths that lead nowhere."""
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


def _results(files: list[File], folder: Path | None, told: Told | None) -> Iterator[tuple[File, Profile | Refused]]:
    """Each file and what it holds, or why nothing; in the order of the files."""
    results: dict[Path, Profile | Refused] = {}
    for file in files:
        if folder is not None and (kept := cache.load(folder, file.path)) is not None:
            results[file.path] = kept
    missing = [file.path for file in files if file.path not in results]
    workers = min(len(missing), _cores())
    if workers > 1:
        _read_apart(results, missing, folder, workers, told)
    else:
        _read_here(results, missing, folder, told)
    for file in files:
        yield file, results[file.path]


def _read_here(
    results: dict[Path, Profile | Refused], paths: list[Path], folder: Path | None, told: Told | None
) -> None:
    """Read files one after the other."""
    sizes = [_size(path) for path in paths]
    for number, path in enumerate(paths):

        def tell(done: int, before: int = sum(sizes[:number])) -> None:
            if told:
                told(before + done, sum(sizes))

        results[path] = _read(path, folder, tell, share=_cores() > 1)


def _read_apart(
    results: dict[Path, Profile | Refused], paths: list[Path], folder: Path | None, workers: int, told: Told | None
) -> None:
    """Read files in processes of their own, the largest first."""
    sizes = {path: _size(path) for path in paths}
    done = 0
    try:
        with ProcessPoolExecutor(workers, _context()) as pool:
            waiting = {pool.submit(_read, path, folder): path for path in sorted(paths, key=lambda p: -sizes[p])}
            for future in as_completed(waiting):
                path = waiting.pop(future)
                results[path] = future.result()
                done += sizes[path]
                if told:
                    told(done, sum(sizes.values()))
    except BrokenProcessPool:
        lost = [path for path in paths if path not in results]
        gone = "reading it was stopped from outside (is there enough memory?)"
        results.update({path: Refused((f"{path}: {gone}",)) for path in lost})


def _read(
    path: Path, folder: Path | None, progress: Callable[[int], None] | None = None, share: bool = False
) -> Profile | Refused:
    """Read one file and keep it in the cache. With `share`, a second process reads the second half of a large one."""
    try:
        stamp = cache.stamp(path) if folder is not None else b""
        size = text_size(path) if share else 0
        if size < _WORTH_SHARING:
            profile = read_profile(path, progress)
        else:
            with ProcessPoolExecutor(1, _context()) as pool:
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
    """What another process read, None if it came to grief; then this one reads on by itself."""
    try:
        return rest.result()
    except (BrokenProcessPool, OSError):
        return None


def _context() -> BaseContext:
    """Forking takes a hundredth of the time that starting Python anew takes; nothing else runs here yet that could mind."""
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def _one_a_rank(profiles: list[Profile]) -> tuple[tuple[Profile, ...], list[str]]:
    """Profiles by rank. Those that do not know theirs get free numbers; of two that claim one, the first has it."""
    by_rank: dict[int, Profile] = {}
    problems = []
    for profile in sorted(profiles, key=lambda p: not p.rank_known):
        if profile.rank_known and profile.rank in by_rank:
            other = by_rank[profile.rank].path
            problems.append(f"{profile.path}: says it is rank {profile.rank}, as {other} does; it is left out")
            continue
        rank = profile.rank if profile.rank_known else next(n for n in range(len(profiles)) if n not in by_rank)
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
