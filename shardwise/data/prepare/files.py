"""The files of a recipe's sources, and their division into units of work, which depends on the files alone."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.data import inputs
from shardwise.data.inputs import Chunk, Input, Unit, import_parquet, refuse_odd_name, split_into_units
from shardwise.data.prepare.recipe import Bad, Recipe
from shardwise.data.prepare.streams import COMPRESSIONS
from shardwise.run.problems import Problem, UserError

KINDS = {**inputs.KINDS, "warc": (".warc", ".wet", ".arc")}


@dataclass(frozen=True)
class File(Input):
    """One file. `zipped`: it cannot be split, because it is compressed, or one text, or a web archive."""

    source: int = 0
    compression: str = ""


def find_files(recipe: Recipe) -> list[File]:
    """All files, in the order of the recipe; files of a folder or a pattern are sorted. A broken Parquet file has one row group if
    bad input is skipped, so that it has a fate."""
    problems: list[Problem] = []
    found: dict[str, File] = {}
    for number, source in enumerate(recipe.sources):
        for name in source.paths:
            paths = list(_behind(name))
            if not paths:
                problems.append(Problem("there is no such file, folder or match", f"sources.{source.name}", name))
            for path in paths:
                try:
                    file = _file(path, number, source.field, recipe.bad)
                except UserError as e:
                    problems += e.problems
                    continue
                except OSError as e:
                    problems.append(Problem(f"cannot be read: {e.strerror or e}", where=path))
                    continue
                if file.path in found:
                    problems.append(Problem("is named twice", f"sources.{source.name}", path))
                found[file.path] = file
    if problems:
        raise UserError(*problems)
    return list(found.values())


def _behind(name: str) -> Iterator[str]:
    if os.path.isdir(name):
        yield from map(str, inputs.files_in(name, KINDS, COMPRESSIONS))
    elif os.path.exists(name):
        yield name
    else:
        yield from sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))


def _file(path: str, source: int, field: str, bad: Bad) -> File:
    refuse_odd_name(path)
    known = inputs.kind_of(path, KINDS, COMPRESSIONS)
    if known is None:
        names = ", ".join(suffix for suffixes in KINDS.values() for suffix in suffixes)
        message = f"has a name of no known kind ({names}; with {', '.join(COMPRESSIONS)} behind all but .parquet)"
        raise UserError(Problem(message, where=path))
    kind, compression = known[0], COMPRESSIONS.get(known[1], "")
    stat = os.stat(path)
    whole = bool(compression) or kind in ("text", "warc")
    file = File(os.path.realpath(path), kind, whole, stat.st_size, stat.st_mtime_ns, (), source, compression)
    return replace(file, row_groups=_groups(path, field, bad)) if kind == "parquet" else file


def _groups(path: str, field: str, bad: Bad) -> tuple[int, ...]:
    arrow, parquet = import_parquet(path)
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                message = f'has no column "{field}"; it has {", ".join(file.schema_arrow.names)}'
                raise UserError(Problem(message, "field", path))
            meta = file.metadata
            return tuple(meta.row_group(number).total_byte_size for number in range(meta.num_row_groups))
    except arrow.ArrowException as e:
        if bad == "skip":
            return (0,)
        raise UserError(Problem(f"is not a Parquet file: {e}", where=path)) from None


def units_of(files: Sequence[File]) -> list[Unit]:
    """Units of about equal size; none has files of two sources."""
    units: list[Unit] = []
    start = 0
    while start < len(files):
        stop = start
        while stop < len(files) and files[stop].source == files[start].source:
            stop += 1
        for unit in split_into_units(files[start:stop]):
            chunks = tuple(Chunk(chunk.input + start, chunk.start, chunk.stop, chunk.bytes) for chunk in unit.chunks)
            units.append(Unit(len(units), chunks))
        start = stop
    return units


def text_bytes(files: Sequence[File]) -> int:
    """An estimate of the bytes of text in the files: compressed files and Parquet count five times their size."""
    return sum(file.bytes * (5 if file.compression or file.kind == "parquet" else 1) for file in files)
