"""Reads the documents of a chunk of input, one by one. Unreadable input becomes a row too, with the reason, so that every part of
the input has a fate: a line that is not JSON or not UTF-8, one too long to hold, the rest of a broken file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shardwise.data.documents import BOM, TEXT_PART, name_of, to_line_start
from shardwise.data.inputs import Chunk, import_parquet
from shardwise.data.prepare.files import File
from shardwise.data.prepare.streams import broken, open_stream
from shardwise.data.prepare.warc import Record, records

_ROWS = 64
_NO_CHARSETS = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")
"""Codecs of Python that are no character set of a page. "undefined", which real servers declare, refuses every text, and "punycode"
takes quadratic time."""


@dataclass(slots=True)
class Row:
    """A document, or the reason why it cannot be read: one of few (`wrong`), and what is particular to it (`detail`). `place` is a
    byte offset in the uncompressed file, or a row of a row group."""

    place: int
    size: int
    text: str = ""
    wrong: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


def read(file: File, chunk: Chunk, name: str, longest: int) -> Iterator[Row]:
    """The rows of a chunk; `name` is the field that holds the text."""
    make: Callable[[], Iterator[Row]] = {
        "text": lambda: _text(file, longest),
        "jsonl": lambda: _jsonl(file, chunk, name, longest),
        "parquet": lambda: _parquet(file, chunk, name, longest),
        "warc": lambda: _warc(file, longest),
    }[file.kind]
    place = chunk.start
    try:
        for row in make():
            place = row.place + row.size
            yield row
    except Exception as e:
        # bzip2 raises a bare OSError; those of the disk have a number.
        if not isinstance(e, broken()) and (type(e) is not OSError or e.errno is not None):
            raise
        yield Row(place, 0, wrong=f"the {file.compression or file.kind} file is broken from here on: {_said(e)}")


def _said(e: Exception) -> str:
    return str(e).splitlines()[0][:100] if str(e) else type(e).__name__


def _not_utf8(place: int, size: int, e: UnicodeDecodeError) -> Row:
    return Row(place, size, wrong="not UTF-8 text", detail=f" at byte {place + e.start}")


def _text(file: File, longest: int) -> Iterator[Row]:
    with open_stream(file.path, file.compression) as source:
        data = source.read(longest + 1)
        if len(data) > longest:
            yield Row(0, min(file.bytes, 2**32 - 1), wrong=_too_long(longest))
        elif data:
            try:
                yield Row(0, len(data), data.removeprefix(BOM).decode("utf-8"), meta={"form": "text"})
            except UnicodeDecodeError as e:
                yield _not_utf8(0, len(data), e)


def _too_long(longest: int) -> str:
    return f"longer than {longest} bytes (longest)"


def _jsonl(file: File, chunk: Chunk, name: str, longest: int) -> Iterator[Row]:
    with open_stream(file.path, file.compression) as source:
        at = to_line_start(source, chunk)
        while file.zipped or at < chunk.stop:
            line = source.readline(longest + 1)
            if not line:
                return
            place, at = at, at + len(line)
            if len(line) > longest and not line.endswith(b"\n"):
                # Skip to the line end without holding the line; the next line is another document.
                while more := source.readline(TEXT_PART):
                    at += len(more)
                    if more.endswith(b"\n"):
                        break
                yield Row(place, min(at - place, 2**32 - 1), wrong=_too_long(longest))
            elif (said := line.removeprefix(BOM) if place == 0 else line).strip():
                yield _value(said, place, name)


def _value(line: bytes, place: int, name: str) -> Row:
    """The text of a line. Its other fields are not kept, except for a url and an id."""
    size = len(line)
    try:
        found = json.loads(line)
    except UnicodeDecodeError as e:
        return _not_utf8(place, size, e)
    except (ValueError, RecursionError) as e:
        return Row(place, size, wrong="not JSON", detail=f": {_said(e)}")
    if not isinstance(found, dict):
        return Row(place, size, wrong=f"not a JSON object but {name_of(found)}")
    if name not in found:
        return Row(place, size, wrong=f'no field "{name}"')
    text = found[name]
    if not isinstance(text, str):
        return Row(place, size, wrong=f'field "{name}" is {name_of(text)}, not text')
    row = Row(place, size, text, _surrogates(text))
    for key in ("id", "url"):
        value = found.get(key)
        if isinstance(value, int) or (isinstance(value, str) and not _surrogates(value)):
            row.meta[key] = value
    return row


def _surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is not text"
    return ""


def _parquet(file: File, chunk: Chunk, name: str, longest: int) -> Iterator[Row]:
    arrow, parquet = import_parquet(file.path)
    place = 0
    try:
        with parquet.ParquetFile(file.path) as source:
            groups = list(range(chunk.start, chunk.stop))
            for batch in source.iter_batches(_ROWS, row_groups=groups, columns=[name], use_threads=False):
                for cell in batch.column(0):
                    yield _cell(cell, place, name, longest)
                    place += 1
    except (arrow.ArrowException, OSError) as e:
        yield Row(place, 0, wrong=f"the row group is broken from here on: {_said(e)}")


def _cell(cell: Any, place: int, name: str, longest: int) -> Row:
    try:
        text = cell.as_py()
    except UnicodeDecodeError:
        return Row(place, 1, wrong="not UTF-8 text")
    if not isinstance(text, str):
        return Row(place, 1, wrong=f'column "{name}" is {name_of(text)}, not text')
    if len(text) > longest:
        return Row(place, 1, wrong=_too_long(longest))
    return Row(place, 1, text)


def _warc(file: File, longest: int) -> Iterator[Row]:
    with open_stream(file.path, file.compression) as source:
        for record in records(source, longest):
            row = _page(record, longest)
            if row is not None:
                yield row


def _page(record: Record, longest: int) -> Row | None:
    """The page or text of a record; None for any other record, such as a request or a picture."""
    place, size = record.place, min(record.size, 2**32 - 1)
    if record.wrong:
        return Row(place, size, wrong=record.wrong if record.wrong != "long" else _too_long(longest))
    if record.text is None:
        return None
    meta = {"form": record.form, **({"url": record.url} if record.url else {})}
    try:
        text = record.text.decode(_codec(record.charset or "utf-8"))
    except (UnicodeError, LookupError):
        try:
            text = record.text.decode("utf-8")
        except UnicodeDecodeError as e:
            if not record.charset:
                return _not_utf8(place, size, e)
            return Row(place, size, wrong="neither UTF-8 nor what it declares", detail=f': "{record.charset}"')
    return Row(place, size, text, _surrogates(text), meta)


def _codec(charset: str) -> str:
    """The name of the codec of a character set; raises `LookupError` if there is none."""
    name = codecs.lookup(charset).name
    if name in _NO_CHARSETS:
        raise LookupError(charset)
    return name
