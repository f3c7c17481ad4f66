"""Safetensors files written a piece at a time, so that memory holds one piece and never the model.

The library writes what is in memory already. The format lets us do better: a header that says what will come,
known beforehand from names, dtypes and shapes, and then the bytes in that order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.model.weight_files import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5_000_000_000  # the customary size of a shard on the Hugging Face hub


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: what it is, known beforehand, and its data, made when its turn comes as pieces
    that follow each other along the first dimension. A piece of another dtype is cast."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(
    folder: str | Path,
    entries: Iterable[Entry],
    shard_bytes: int = SHARD_BYTES,
    stem: str = "model",
    metadata: dict[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write one file, or shards of at most `shard_bytes` (or one larger tensor) and their index; gives the
    bytes of all tensors. `progress` is told the bytes of every piece written."""
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= entry.bytes
    shards = shards or [[]]
    folder = Path(folder)
    count = len(shards)
    files = (
        [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        if count > 1
        else [f"{stem}.safetensors"]
    )
    for file, shard in zip(files, shards, strict=True):
        _write_file(folder / file, shard, metadata or {}, progress)
    total = sum(entry.bytes for shard in shards for entry in shard)
    if count > 1:
        where = {entry.name: file for file, shard in zip(files, shards, strict=True) for entry in shard}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(content, indent=2) + "\n")
    sync_folder(folder)
    return total


def _write_file(
    file: Path, shard: list[Entry], metadata: dict[str, str], progress: Callable[[int], None] | None
) -> None:
    # Wide numbers first: the format allows no gaps, so this order keeps every tensor aligned to its width.
    shard = sorted(shard, key=lambda entry: -entry.dtype.itemsize)
    # Some readers, transformers 4 among them, refuse a file that does not say which library's layout it has.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}
    offset = 0
    for entry in shard:
        span = [offset, offset := offset + entry.bytes]
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": span,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for entry in shard:
            written = 0
            for piece in entry.pieces():
                data = piece.detach().to("cpu", entry.dtype).contiguous().flatten().view(torch.uint8)
                f.write(data.numpy().data)
                written += len(data)
                if progress is not None:
                    progress(len(data))
            if written != entry.bytes:
                raise RuntimeError(f"{entry.name}: {written} bytes were given for a tensor of {entry.bytes}")
        f.flush()
        os.fsync(f.fileno())


def write_text(file: Path, text: str) -> None:
    """Write a small file that is on the disk when this returns."""
    with open(file, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder, and not just its files, outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
