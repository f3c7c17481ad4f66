"""The output of a task: documents for the next stage, removed documents with reasons, examples, counts. A task's folder appears
complete or not at all, so a task is done when its folder exists; two workers that run the same task write the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.files import sync

DOCUMENTS, ENDED, ROWS, FINAL, REPORT = "documents.bin", "ended.bin", "rows.bin", "documents.jsonl", "report.json"
VERDICTS = "verdicts.bin"
ENDED_ROW = np.dtype([("row", "<u4"), ("step", "u1"), ("reason", "<u2"), ("size", "<u4"), ("other", "<u8")])
"""A removed document: its row, the step and reason, the length of its text, and the document it repeats."""
READ_ROW = np.dtype([("file", "<u4"), ("place", "<u8"), ("size", "<u4")])
"""The position of a document in the input."""
KEPT_ROW = np.dtype([("row", "<u4"), ("changed", "<u4"), ("size", "<u4")])
KEPT = "kept.bin"
NO_OTHER = 2**64 - 1
READ = 255
"""The `step` value of unreadable input; other steps count from 0."""
_HEAD = struct.Struct("<IIIQ")
_EXCERPT = 300
EXAMPLES = 3
"""The examples kept of each reason."""


@contextmanager
def task_folder(folder: Path) -> Iterator[Path]:
    """A draft of a task's folder, renamed to its final name when it is complete."""
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    draft.mkdir(parents=True)
    try:
        yield draft
        for file in draft.iterdir():
            sync(file)
        try:
            os.rename(draft, folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(draft, ignore_errors=True)  # another worker did the same task
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


class DocumentFile:
    """Writes documents for the next stage: row, bit mask of the steps that changed it, metadata, text."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / DOCUMENTS, "wb", buffering=2**20)  # noqa: SIM115

    def write(self, row: int, changed: int, meta: dict[str, Any], text: str) -> None:
        known = json.dumps(meta, sort_keys=True).encode() if meta else b""
        data = text.encode("utf-8")
        self._file.write(_HEAD.pack(row, changed, len(known), len(data)))
        self._file.write(known)
        self._file.write(data)

    def close(self) -> None:
        self._file.close()


def read_documents(folder: Path) -> Iterator[tuple[int, int, dict[str, Any], str]]:
    """Read the documents that a `DocumentFile` wrote."""
    with open(folder / DOCUMENTS, "rb", buffering=2**20) as file:
        while head := file.read(_HEAD.size):
            row, changed, known, size = _HEAD.unpack(head)
            meta = json.loads(file.read(known)) if known else {}
            yield row, changed, meta, file.read(size).decode("utf-8")


class Log:
    """Records what happened to the documents of a task."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._ended = open(folder / ENDED, "wb")  # noqa: SIM115
        self._reasons: dict[str, int] = {}
        self._examples: dict[str, list[dict[str, Any]]] = {}
        self._count: dict[str, list[int]] = {}
        self._seen = {step: [0, 0] for step in range(steps)}  # documents and characters that reached a step
        self._changed = {step: [0, 0] for step in range(steps)}  # documents it changed, characters it removed

    def came(self, step: int, size: int) -> None:
        self._seen[step][0] += 1
        self._seen[step][1] += size

    def changed(self, step: int, before: int, after: int) -> None:
        self._changed[step][0] += 1
        self._changed[step][1] += before - after

    def ended(self, row: int, step: int, reason: str, text: str, size: int, name: str, other: int = NO_OTHER) -> None:
        number = self._reasons.setdefault(reason, len(self._reasons))
        self._ended.write(np.array([(row, step, number, size, other)], ENDED_ROW).tobytes())
        key = f"{step}:{reason}"
        count = self._count.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += size
        examples = self._examples.setdefault(key, [])
        if len(examples) < EXAMPLES:
            examples.append({"id": name, "text": text[:_EXCERPT]})

    def close(self, **more: Any) -> None:
        self._ended.close()
        report = {
            "reasons": list(self._reasons),
            "count": self._count,
            "examples": self._examples,
            "seen": self._seen,
            "changed": self._changed,
            **more,
        }
        # An example of unreadable input may hold half of a surrogate pair, which UTF-8 has not.
        (self._folder / REPORT).write_text(json.dumps(report, ensure_ascii=False), encoding="utf-8", errors="replace")


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a task."""
    return json.loads((folder / REPORT).read_text(encoding="utf-8"))


def read_rows(folder: Path, name: str, dtype: np.dtype[Any]) -> np.ndarray:
    """All rows of a task's file."""
    return np.fromfile(folder / name, dtype)
