"""Reads the documents of a chunk of input one by one; the whole chunk is never in memory. A text file is one document, split at
line ends into parts that fit in memory; JSONL has one document per line, Parquet one per row. Unreadable documents are reported
with their file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from shardwise.data.inputs import Chunk, Input, import_parquet
from shardwise.run.problems import Problem, UserError

# A text longer than this is tokenised in parts, split at line ends.
TEXT_PART = 2**20
_ROWS = 256
# Enough to see a pattern; a file that is wrong throughout must not fill the screen.
MOST_PROBLEMS = 10
BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Part:
    """A document, or a part of a long one. `place` is where it starts, for messages: a byte offset or a row."""

    text: str
    consumed: int  # bytes of input, for the progress bar
    place: int
    first: bool = True
    last: bool = True


class Reader:
    """Iterates over the documents of one chunk; problems are collected, and raised at the end or when there are many."""

    def __init__(self, file: Input, chunk: Chunk, field: str) -> None:
        self.file = file
        self.chunk = chunk
        self.field = field
        self.problems: list[Problem] = []
        self._reported = chunk.start

    def __iter__(self) -> Iterator[Part]:
        with self.whole():
            yield from {"text": self._text, "jsonl": self._jsonl, "parquet": self._parquet}[self.file.kind]()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Raise the problems with documents at the end of the block, or when the file itself cannot be read any further."""
        try:
            yield
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            self.problems.append(Problem(f"is not a complete gzip file: {e}", where=self.file.path))
        except OSError as e:
            self.problems.append(Problem(f"cannot be read: {e.strerror or e}", where=self.file.path))
        if self.problems:
            raise UserError(*self.problems)

    def _open(self) -> IO[bytes]:
        if self.file.zipped:
            return gzip.open(self.file.path)  # type: ignore[return-value]
        return open(self.file.path, "rb", buffering=TEXT_PART)

    def _consumed(self, source: Any, at: int) -> int:
        """Bytes of the file read since the last call; for a gzip file, compressed bytes."""
        position = source.fileobj.tell() if self.file.zipped else at
        before, self._reported = self._reported, max(self._reported, position)
        return self._reported - before

    def refuse(self, place: int, message: str) -> None:
        """Record what is wrong with the document at `place`."""
        if self.file.kind == "parquet":
            where = f"{self.file.path}: row group {self.chunk.start}, row {place + 1}"
        else:
            with self._open() as source:
                where = f"{self.file.path}:{_line_number(source, place)}"
        problem = Problem(message, where=where)
        if problem not in self.problems:  # a line of text may break in two parts of its file
            self.problems.append(problem)
        if len(self.problems) >= MOST_PROBLEMS:
            raise UserError(*self.problems)

    def _text(self) -> Iterator[Part]:
        with self._open() as source:
            at = _text_edge(source, self.chunk.start)
            first = self.chunk.start == 0
            ends_file = self.file.zipped or self.chunk.stop >= self.file.bytes
            stop = None if ends_file else _text_edge(source, self.chunk.stop)
            source.seek(at)
            rest = b""
            while True:
                wanted = TEXT_PART if stop is None else min(TEXT_PART, stop - at - len(rest))
                block = source.read(wanted)
                data = rest + block
                finished = not block or (stop is not None and at + len(data) >= stop)
                edge = len(data) if finished else _good_edge(data)
                head, rest = data[:edge], data[edge:]
                if head or (finished and ends_file):
                    consumed = self._consumed(source, at + len(head))
                    yield from self._text_part(head, at, consumed, first, finished and ends_file)
                    first = False
                at += len(head)
                if finished:
                    return

    def _text_part(self, data: bytes, at: int, consumed: int, first: bool, last: bool) -> Iterator[Part]:
        start = len(BOM) if at == 0 and data.startswith(BOM) else 0
        try:
            yield Part(data[start:].decode("utf-8"), consumed, at, first, last)
        except UnicodeDecodeError as e:
            self.refuse(at + start + e.start, "is not UTF-8 text")

    def each_line(self) -> Iterator[tuple[bytes, int, int]]:
        """Every line of the chunk, with its byte offset and the bytes of input consumed since the last line."""
        with self._open() as source:
            at = to_line_start(source, self.chunk)
            while self.file.zipped or at < self.chunk.stop:
                line = source.readline()
                if not line:
                    return
                place, at = at, at + len(line)
                yield line.removeprefix(BOM) if place == 0 else line, place, self._consumed(source, at)

    def _jsonl(self) -> Iterator[Part]:
        for line, place, consumed in self.each_line():
            text = self._value(line, place) if line.strip() else None
            if text is not None:
                yield Part(text, consumed, place)

    def _value(self, line: bytes, place: int) -> str | None:
        try:
            row = json.loads(line.decode("utf-8").rstrip("\r\n"))
            value = row[self.field]
        except UnicodeDecodeError:
            self.refuse(place, "is not UTF-8 text")
        except json.JSONDecodeError as e:
            self.refuse(place, f"is not valid JSON: {e.msg} at character {e.pos + 1}")
        except (ValueError, RecursionError) as e:
            self.refuse(place, f"is not valid JSON: {e}")
        except KeyError:
            known = ", ".join(map(str, list(row)[:8])) or "no fields at all"
            self.refuse(place, f'has no field "{self.field}"; it has {known}: name one with --field')
        except (TypeError, IndexError):
            self.refuse(place, f"is not a JSON object with fields, but {name_of(row)}")
        else:
            if isinstance(value, str):
                return value
            self.refuse(place, f'field "{self.field}" is {name_of(value)}, not text')
        return None

    def _parquet(self) -> Iterator[Part]:
        with self.batches([self.field]) as (batches, consumed):
            cells = (cell for batch in batches for cell in batch.column(0))
            for row, cell in enumerate(cells):
                text = self._cell(cell, row)
                if text is not None:
                    yield Part(text, consumed, row)

    @contextmanager
    def batches(self, columns: list[str] | None = None) -> Iterator[tuple[Iterator[Any], int]]:
        """The rows of the chunk's row groups in batches, and the bytes of input that a row counts for."""
        arrow, parquet = import_parquet(self.file.path)
        try:
            with parquet.ParquetFile(self.file.path) as source:
                groups = list(range(self.chunk.start, self.chunk.stop))
                rows = sum(source.metadata.row_group(g).num_rows for g in groups)
                batches = source.iter_batches(_ROWS, row_groups=groups, columns=columns, use_threads=False)
                yield batches, self.chunk.bytes // max(rows, 1)
        except (arrow.ArrowException, UnicodeDecodeError) as e:
            self.problems.append(Problem(f"cannot be read as Parquet: {e}", where=self.file.path))

    def _cell(self, cell: Any, row: int) -> str | None:
        try:
            value = cell.as_py()
        except UnicodeDecodeError:
            self.refuse(row, f'column "{self.field}" is not UTF-8 text')
            return None
        if value is None:
            self.refuse(row, f'column "{self.field}" is null, not text')
        return value


def to_line_start(source: IO[bytes], chunk: Chunk) -> int:
    """Seek to the first line that begins in a chunk, but not beyond the chunk: else each chunk of a long line would read all of
    it."""
    if chunk.start == 0:
        return 0
    at = chunk.start - 1
    source.seek(at)
    while at < chunk.stop and (block := source.readline(min(TEXT_PART, chunk.stop - at))):
        at += len(block)
        if block.endswith(b"\n"):
            break
    return at


def _text_edge(source: IO[bytes], offset: int) -> int:
    """Where to split a text at or after an offset: at a line end if one is near, else at a space, else between characters. Two
    neighbouring chunks find the same offset, and neither reads far to find it."""
    if offset == 0:
        return 0
    source.seek(offset - 1)
    data = source.read(TEXT_PART + 1)
    line, space = data.find(b"\n"), data.find(b" ", 1)
    if line >= 0:
        return offset + line
    if space >= 0:
        return offset - 1 + space
    later = 1
    while later < len(data) and data[later] & 0xC0 == 0x80:
        later += 1
    return offset - 1 + later


def _good_edge(data: bytes) -> int:
    """Where to split a text that continues: after its last line end, else before its last space, else between characters."""
    edge = data.rfind(b"\n") + 1 or data.rfind(b" ")  # most BPE tokens begin with their space
    if edge <= 0:
        edge = len(data)
        while edge > max(len(data) - 4, 1) and data[edge - 1] & 0xC0 == 0x80:
            edge -= 1
        if data[edge - 1] >= 0xC0:
            edge -= 1
    return edge or len(data)


def _line_number(source: IO[bytes], offset: int) -> int:
    lines = 1
    while offset > 0 and (block := source.read(min(TEXT_PART, offset))):
        lines += block.count(b"\n")
        offset -= len(block)
    return lines


def name_of(value: Any) -> str:
    """The name of a JSON value's type, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
