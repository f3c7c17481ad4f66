"""The input files of a token set, and how they are split into units of work. The split depends on the files alone, not on the
number of workers, so neither does the result. A large file is split at line ends or row groups, so that it keeps every worker
busy."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from shardwise.run.problems import Problem, UserError, install

KINDS = {"text": (".txt", ".md", ".rst", ".text"), "jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",)}

# Enough units for an even load, but neither so small that starting one costs much nor so many that a folder gets slow.
_UNITS = 512
_SMALLEST, _LARGEST = 2**18, 2**26


@dataclass(frozen=True)
class Input:
    """One file. For Parquet, `row_groups` has the bytes of each row group."""

    path: str
    kind: str  # "text", "jsonl" or "parquet"
    zipped: bool
    bytes: int
    modified: int  # nanoseconds
    row_groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A range of bytes, or of row groups, of an input. A line belongs to the chunk that its first byte is in."""

    input: int
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True)
class Unit:
    """The work a worker gets at a time; an interrupted build keeps or loses whole units."""

    number: int
    chunks: tuple[Chunk, ...]


Kinds = Mapping[str, Sequence[str]]


def kind_of(path: str | Path, kinds: Kinds = KINDS, packings: Container[str] = (".gz",)) -> tuple[str, str] | None:
    """The kind of a file by its name, and the suffix of its compression; None for an unknown name."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in packings else ""
    for kind, known in kinds.items():
        if suffixes and suffixes[-1] in known and not (packed and kind == "parquet"):
            return kind, packed
    return None


def find_inputs(names: Sequence[str | Path], field: str | None) -> list[Input]:
    """The files behind the names, in the order given; files of a folder are sorted, hidden ones left out. Without a `field`, whole
    rows are read from JSONL or Parquet, with any columns."""
    problems: list[Problem] = []
    found: dict[str, Input] = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            paths = list(files_in(path))
            if not paths:
                known = ", ".join(chain.from_iterable(KINDS.values()))
                problems.append(
                    Problem(f"holds no file to read ({known}, or the first ones with .gz)", where=str(name))
                )
        elif path.is_file():
            paths = [path]
        else:
            problems.append(Problem("there is no such file or folder", where=str(name)))
            continue
        for each in paths:
            try:
                _add(each, field, found)
            except UserError as e:
                problems += e.problems
            except OSError as e:
                problems.append(Problem(f"cannot be read: {e.strerror}", where=str(each)))
    if not names:
        problems.append(Problem("name at least one file or folder to build from"))
    if problems:
        raise UserError(*problems)
    return list(found.values())


def files_in(folder: str | Path, kinds: Kinds = KINDS, packings: Container[str] = (".gz",)) -> Iterator[Path]:
    """The files of known kinds in a folder and those in it, sorted, without hidden ones."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in sorted(files):
            if not file.startswith(".") and kind_of(file, kinds, packings):
                yield Path(here, file)


def refuse_odd_name(path: str | Path) -> None:
    """Raise for a name that is not UTF-8: plans and fates are JSON, which cannot hold it."""
    name = os.fsencode(os.path.realpath(path)).decode("utf-8", "replace")
    if name != os.path.realpath(path):
        where = os.fsencode(path).decode("utf-8", "replace")
        raise UserError(Problem("has a name that is not UTF-8; rename it", where=where))


def _add(path: Path, field: str | None, found: dict[str, Input]) -> None:
    refuse_odd_name(path)
    kind, packed = kind_of(path) or ("text", path.suffix.lower() == ".gz")
    if path.name.lower().endswith((".json", ".json.gz")):
        message = "is .json: name it .jsonl if each line is an object, or .txt if the JSON itself is the text"
        raise UserError(Problem(message, where=str(path)))
    if field is None and kind == "text":
        raise UserError(Problem("is a text; conversations are rows of .jsonl or .parquet", where=str(path)))
    resolved = str(path.resolve())
    if resolved in found:
        raise UserError(Problem("is named twice, by itself or through a folder", where=str(path)))
    with open(path, "rb"):  # fails before work starts, not in the middle of it
        stat = path.stat()
    groups = _row_groups(path, field) if kind == "parquet" else ()
    found[resolved] = Input(resolved, kind, bool(packed), stat.st_size, stat.st_mtime_ns, groups)


def _row_groups(path: Path, field: str | None) -> tuple[int, ...]:
    """The bytes of each row group; checks that the column exists and holds text."""
    arrow, parquet = import_parquet(str(path))
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as e:
        raise UserError(Problem(f"is not a Parquet file: {e}", where=str(path))) from None
    with file:
        schema = file.schema_arrow
        if field is None:
            return _group_bytes(file.metadata)
        if schema.names.count(field) != 1:
            message = f'has no column "{field}"; it has {", ".join(schema.names)}: name one with --field'
            raise UserError(Problem(message, where=str(path)))
        kind = schema.field(field).type
        if arrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or str(kind) == "string_view"):
            raise UserError(Problem(f'column "{field}" holds {kind}, not text', where=str(path)))
        return _group_bytes(file.metadata)


def _group_bytes(meta: Any) -> tuple[int, ...]:
    return tuple(meta.row_group(g).total_byte_size for g in range(meta.num_row_groups))


def refuse_changed(inputs: Sequence[Input]) -> None:
    """Raise when a file changed while it was read: the set would be neither the old nor the new one."""
    problems = []
    for file in inputs:
        try:
            stat = os.stat(file.path)
            same = (stat.st_size, stat.st_mtime_ns) == (file.bytes, file.modified)
        except OSError:
            same = False
        if not same:
            message = "changed while the set was built; build again with --restart when it no longer changes"
            problems.append(Problem(message, where=file.path))
    if problems:
        raise UserError(*problems)


def import_parquet(where: str) -> tuple[Any, Any]:
    """pyarrow, or a message that says how to install it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        message = f"Parquet needs pyarrow: {install('parquet')}"
        raise UserError(Problem(message, where=where)) from None
    return pyarrow, pyarrow.parquet


def unit_bytes(inputs: Sequence[Input]) -> int:
    """The size of a unit of work, from the total size of the inputs."""
    return min(max(sum(i.bytes for i in inputs) // _UNITS, _SMALLEST), _LARGEST)


def split_into_units(inputs: Sequence[Input]) -> list[Unit]:
    """All inputs, in order, as units of about equal size."""
    size = unit_bytes(inputs)
    units: list[Unit] = []
    gathered: list[Chunk] = []
    gathered_bytes = 0
    for chunk in _chunks(inputs, size):
        if gathered and gathered_bytes + chunk.bytes > size:
            units.append(Unit(len(units), tuple(gathered)))
            gathered, gathered_bytes = [], 0
        gathered.append(chunk)
        gathered_bytes += chunk.bytes
    if gathered:
        units.append(Unit(len(units), tuple(gathered)))
    return units


def _chunks(inputs: Sequence[Input], size: int) -> Iterator[Chunk]:
    for number, file in enumerate(inputs):
        if file.kind == "parquet":
            # Row-group sizes are uncompressed; the progress bar needs them scaled to add up to the file size.
            total = max(sum(file.row_groups), 1)
            for group, group_bytes in enumerate(file.row_groups):
                yield Chunk(number, group, group + 1, group_bytes * file.bytes // total)
        elif file.zipped or file.bytes <= size:
            yield Chunk(number, 0, file.bytes, file.bytes)
        else:
            for start in range(0, file.bytes, size):
                stop = min(start + size, file.bytes)
                yield Chunk(number, start, stop, stop - start)
