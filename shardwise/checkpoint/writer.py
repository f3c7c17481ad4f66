"""Writes safetensors files as a stream: a rank's shards from their staged copy, or weights one chunk at a time.

The safetensors library writes whole tensors in one call, from memory of its own. Here the header, which follows from names, dtypes
and shapes, is computed beforehand, and the bytes follow in that order: memory never holds the model a second time, shards go to
disk while their checksums are computed, and a conversion holds one chunk.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.format import BLOCK, DTYPES, LocalShard, Progress, checksum, shard_file, unwatched
from shardwise.files import sync, write_atomically

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLUSH = 1 << 26  # bytes written between two flushes to the disk
AHEAD = 4 * FLUSH  # unflushed bytes at which writing waits, so that no single flush takes long
FILE_BYTES = 5_000_000_000  # the customary size of a shard on the Hugging Face hub


def write_shards(
    draft: Path, rank: int, shards: Sequence[LocalShard], staged: Tensor, progress: Progress = unwatched
) -> None:
    """Write a rank's file from the staged bytes of its shards. It gets its final name only when all of it is on disk, so a file
    with that name is complete. `progress` is called with the bytes of every block."""
    begins = [0, *accumulate(shard.values.nbytes for shard in shards)]
    data = staged.numpy().data
    draft.mkdir(parents=True, exist_ok=True)
    path, writing = draft / shard_file(rank), _writing(draft, rank)
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    handle = os.open(writing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # Checksums are computed while writing; both release the GIL for the training.
        with ThreadPoolExecutor(1, "checksums") as beside:
            sums = [beside.submit(checksum, data[a:b]) for a, b in pairwise(begins)]
            os.lseek(handle, len(_shards_header(shards, [0] * len(shards))), os.SEEK_SET)
            _write(handle, data, progress)
            header = _shards_header(shards, [crc.result() for crc in sums])
        os.lseek(handle, 0, os.SEEK_SET)
        _write(handle, memoryview(header), progress)
        os.fsync(handle)
    finally:
        os.close(handle)
    writing.rename(path)


def _writing(draft: Path, rank: int) -> Path:
    return draft / f"{shard_file(rank)}.writing"


def _shards_header(shards: Sequence[LocalShard], sums: Sequence[int]) -> bytes:
    """The header of a rank's file; its length does not depend on the checksums."""
    boxes = {s.name: dict(shape=s.shape, offset=s.offset, crc32=f"{c:08x}") for s, c in zip(shards, sums, strict=True)}
    tensors = [(s.name, s.values.dtype, tuple(s.values.shape)) for s in shards]
    return _header(tensors, {"shards": json.dumps(boxes, separators=(",", ":"))})


def _header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    # Some readers, transformers 4 among them, refuse a file whose metadata has no `format`.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}
    offset = 0
    for name, dtype, shape in tensors:
        span = [offset, offset := offset + math.prod(shape) * dtype.itemsize]
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(handle: int, data: memoryview, progress: Progress) -> None:
    """Write and flush to disk in parallel: with a single flush at the end, the disk would be idle until then."""
    flushing: Future[None] | None = None
    with ThreadPoolExecutor(1, "flush") as beside:
        done, sent = 0, 0
        while done < len(data):
            count = os.write(handle, data[done : done + BLOCK])
            done += count
            progress(count)
            if flushing is not None and done - sent >= AHEAD:
                flushing.result()
                progress(1)
            if done - sent >= FLUSH and (flushing is None or flushing.done()):
                flushing, sent = beside.submit(os.fdatasync, handle), done
    if flushing is not None:
        flushing.result()  # a disk error is reported only once, perhaps to this flush
        progress(1)


def failure_file(rank: int) -> str:
    """The file in which a rank records why it could not write its shards."""
    return f"rank-{rank:05d}.failed"


def report_failure(draft: Path, rank: int, reason: str) -> None:
    """Delete the partial file and record the reason, as far as the disk still allows it. The rank that commits then stops
    waiting."""
    try:
        _writing(draft, rank).unlink(missing_ok=True)
        write_atomically(draft / failure_file(rank), reason.encode())
    except OSError:
        return  # ranks learn of it by `gather` before the next checkpoint


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its name, dtype and shape, known beforehand, and its data, generated on writing as consecutive chunks
    along the first dimension. A chunk of another dtype is cast."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(
    folder: Path, entries: Iterable[Entry], file_bytes: int = FILE_BYTES, progress: Callable[[int], None] | None = None
) -> int:
    """Write `model.safetensors`, or numbered files of at most `file_bytes` (or one larger tensor) and their index; returns the
    bytes of all tensors. `progress` is called with the bytes of every chunk written."""
    files: list[list[Entry]] = []
    left = 0
    for entry in entries:
        if not files or entry.bytes > left:
            files.append([])
            left = file_bytes
        files[-1].append(entry)
        left -= entry.bytes
    files, count = files or [[]], len(files)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    where: dict[str, str] = {}
    total = 0
    for name, members in zip(names if count > 1 else ["model.safetensors"], files, strict=True):
        _write_file(folder / name, members, progress or (lambda _: None))
        where |= {entry.name: name for entry in members}
        total += sum(entry.bytes for entry in members)
    if count > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_atomically(folder / "model.safetensors.index.json", (json.dumps(content, indent=2) + "\n").encode())
    sync(folder)
    return total


def _write_file(file: Path, entries: list[Entry], progress: Callable[[int], None]) -> None:
    # Wide dtypes first: the format allows no gaps, so this order keeps every tensor aligned to its itemsize.
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    with open(file, "wb") as f:
        f.write(_header([(entry.name, entry.dtype, entry.shape) for entry in entries], {}))
        for entry in entries:
            written = 0
            for chunk in entry.chunks():
                data = chunk.detach().to("cpu", entry.dtype).contiguous().flatten().view(torch.uint8)
                f.write(data.numpy().data)
                written += len(data)
                progress(len(data))
            if written != entry.bytes:
                raise RuntimeError(f"{entry.name}: {written} bytes were given for a tensor of {entry.bytes}")
        f.flush()
        os.fsync(f.fileno())
