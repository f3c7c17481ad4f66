"""Reads the rows of a chunk of JSONL or Parquet one by one. A row that cannot be read does not stop the others: it is returned as
the reason, with its line, so that every row is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.data.chat.messages import BadRow
from shardwise.data.documents import Reader, name_of
from shardwise.data.inputs import Chunk, Input


@dataclass(slots=True)
class Row:
    """A row, or the reason why it cannot be read. `line` counts from 1 at the beginning of the chunk."""

    value: Any
    line: int
    consumed: int  # bytes of input, for the progress bar
    bad: BadRow | None = None


class RowReader(Reader):
    """The rows of one chunk. `lines` counts the lines read so far; the counts of earlier chunks give a line's number in its
    file."""

    def __init__(self, file: Input, chunk: Chunk) -> None:
        super().__init__(file, chunk, "")
        self.lines = 0

    def rows(self) -> Iterator[Row]:
        """All rows. Raises `UserError` if the file itself cannot be read any further."""
        with self.whole():
            yield from self._lines() if self.file.kind == "jsonl" else self._groups()

    def _lines(self) -> Iterator[Row]:
        for line, _, consumed in self.each_line():
            self.lines += 1
            if line.isspace() or not line:
                continue
            try:
                yield Row(_parse(line), self.lines, consumed)
            except BadRow as e:
                yield Row(None, self.lines, consumed, e)

    def _groups(self) -> Iterator[Row]:
        with self.batches() as (batches, consumed):
            for batch in batches:
                for value in batch.to_pylist():
                    self.lines += 1
                    yield Row(value, self.lines, consumed)


def place(file: Input, line: int) -> str:
    """The location of a row, for messages."""
    return f"{file.path}: row {line}" if file.kind == "parquet" else f"{file.path}:{line}"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRow("is not UTF-8 text") from None
    except json.JSONDecodeError as e:
        raise BadRow("is not valid JSON", f"{e.msg} at character {e.pos + 1}") from None
    except (ValueError, RecursionError) as e:
        raise BadRow("is not valid JSON", str(e)) from None
    if not isinstance(row, dict):
        raise BadRow("is not a JSON object with fields", f"but {name_of(row)}")
    return row
