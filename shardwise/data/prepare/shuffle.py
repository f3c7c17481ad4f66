"""Shuffles the keys of documents on disk: every unit writes its keys ordered by partition, and the task of a partition reads its
slice of every unit. Neither holds more than a buffer or one partition, however large the corpus."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Records = NDArray[Any]
ROW_BITS = 32
VERDICT = np.dtype([("id", "<u8"), ("other", "<u8"), ("place", "<u4")])
"""A comparison's finding for document `id`: the document it repeats and, for substrings, the position of the repeat."""
_BUFFER = 2**26
"""Bytes of keys that are buffered before they are written."""
KEYS, RUNS = "keys.bin", "runs.npy"


def pack(unit: int, row: int) -> int:
    """The number of a document: its unit and its row there. Numbers are in the order of the corpus."""
    return unit << ROW_BITS | row


class KeyWriter:
    """Writes the keys of a unit as runs, each ordered by partition."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], partitions: int) -> None:
        self._folder, self._dtype, self._partitions = folder, dtype, partitions
        self._file = open(folder / KEYS, "wb")  # noqa: SIM115
        self._held: list[tuple[NDArray[np.int64], Records]] = []
        self._bytes = 0
        self._runs: list[NDArray[np.int64]] = []

    def add(self, partitions: NDArray[np.int64], records: Records) -> None:
        """Add the keys of one document, each with its partition."""
        self._held.append((partitions, records))
        self._bytes += records.nbytes + partitions.nbytes
        if self._bytes >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        partitions = np.concatenate([each[0] for each in self._held])
        records = np.concatenate([each[1] for each in self._held])
        self._held, self._bytes = [], 0
        order = np.argsort(partitions, kind="stable")
        before = self._runs[-1][-1] if self._runs else 0
        counts = np.bincount(partitions, minlength=self._partitions)
        self._runs.append(before + np.concatenate([[0], np.cumsum(counts)]))
        self._file.write(records[order].tobytes())

    def close(self) -> None:
        """Write the buffered keys and the index of the runs."""
        self._flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        runs = np.array(self._runs, np.int64).reshape(-1, self._partitions + 1)
        with open(self._folder / RUNS, "wb") as file:
            np.save(file, runs)


def read_partition(folders: Iterable[Path], partition: int, dtype: np.dtype[Any]) -> Records:
    """The keys of a partition from all units, in order."""
    found = []
    for folder in folders:
        # Not loaded: it has an entry for every partition, of which one is needed.
        runs = np.load(folder / RUNS, mmap_mode="r")
        with open(folder / KEYS, "rb") as file:
            for start, stop in runs[:, partition : partition + 2].tolist():
                if stop > start:
                    file.seek(start * dtype.itemsize)
                    found.append(np.fromfile(file, dtype, stop - start))
    return np.concatenate(found) if found else np.empty(0, dtype)


def verdicts_of_unit(files: Iterable[Path], unit: int) -> Records:
    """The verdicts on the documents of a unit, in document order. Each file is sorted by document."""
    found = []
    for path in files:
        if not path.stat().st_size:
            continue
        rows = np.memmap(path, VERDICT, "r")
        low, high = np.searchsorted(rows["id"], np.array([pack(unit, 0), pack(unit + 1, 0)], np.uint64))
        if high > low:
            found.append(np.array(rows[low:high]))
    if not found:
        return np.empty(0, VERDICT)
    together = np.concatenate(found)
    return together[np.lexsort((together["place"], together["id"]))]
