"""One rank's part of a checkpoint: its pieces in one file, and a table that says what they are.

The table takes its name only when everything before it is on the disk, so that whoever sees it can count on the pieces. A
rank that cannot write says so in a file of its own, and the rank that commits stops waiting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

from torch import Tensor

from shardwise.model.saved_files import BLOCK, checksum, data_file, table_file
from shardwise.model.weight_writer import DTYPE_NAMES, write_text
from shardwise.train.saves.contents import Kept

FLUSH = 1 << 26  # bytes written before they are sent on to the disk


def write_part(draft: Path, rank: int, pieces: Sequence[Kept], staged: Tensor) -> None:
    """Write the staged bytes of the pieces, then their table. On the disk when this returns."""
    begins = [0, *accumulate(piece.values.nbytes for piece in pieces)]
    data = staged.numpy().data
    draft.mkdir(parents=True, exist_ok=True)
    # Checksums are computed beside the writing; both leave Python's lock to the training.
    with ThreadPoolExecutor(1, "checksums") as beside:
        sums = [beside.submit(checksum, data[a:b]) for a, b in pairwise(begins)]
        _write_file(draft / data_file(rank), data)
        table = [
            dict(
                name=piece.name,
                dtype=DTYPE_NAMES[piece.values.dtype],
                shape=piece.shape,
                offset=piece.box.offset,
                size=piece.box.size,
                begin=begin,
                crc=crc.result(),
            )
            for piece, begin, crc in zip(pieces, begins, sums, strict=False)
        ]
    _appear(draft / table_file(rank), json.dumps({"pieces": table}, separators=(",", ":")) + "\n")


def _write_file(path: Path, data: memoryview) -> None:
    """Write a file that is on the disk when this returns. What is written is sent on to the disk at once, beside the writing:
    left to the end, the disk would stand idle until then."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with ThreadPoolExecutor(1, "flush") as beside:
            done, sent = 0, 0
            flushing: Future[None] | None = None
            while done < len(data):
                done += os.write(handle, data[done : done + BLOCK])
                if done - sent >= FLUSH and (flushing is None or flushing.done()):
                    flushing, sent = beside.submit(os.fdatasync, handle), done
        os.fsync(handle)
        if flushing is not None:
            flushing.result()  # an error of the disk is reported once, and may have been reported there
    finally:
        os.close(handle)


def failure_file(rank: int) -> str:
    """Where a rank says why it could not write its part."""
    return f"rank-{rank:05d}.failed"


def report_failure(draft: Path, rank: int, reason: str) -> None:
    """Give the disk back what was written of the part, and say why, as far as the disk still lets us."""
    try:
        (draft / data_file(rank)).unlink(missing_ok=True)
        _appear(draft / failure_file(rank), reason)
    except OSError:
        return  # the ranks tell each other once more at the next save


def _appear(path: Path, text: str) -> None:
    """Make a small file that is whole from the moment it can be seen."""
    writing = path.with_name(f"{path.name}.writing")
    write_text(writing, text)
    writing.rename(path)
