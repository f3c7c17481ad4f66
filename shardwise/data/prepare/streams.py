"""Opens compressed files as streams: gzip, bzip2, xz and zstd. Several compressed parts in one file are read one after
another."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from pathlib import Path
from typing import IO, Any

from shardwise.run.problems import Problem, UserError, install

COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}


def broken() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    found: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)
    try:
        from zstandard import ZstdError
    except ModuleNotFoundError:
        return found
    return (*found, ZstdError)


def open_stream(path: str | Path, compression: str) -> IO[bytes]:
    """The bytes of a file behind its compression, "" for none."""
    if compression == "gzip":
        return gzip.open(path)  # type: ignore[return-value]
    if compression == "bzip2":
        return bz2.open(path)
    if compression == "xz":
        return lzma.open(path)
    if compression == "zstd":
        return _zstd(path)
    return open(path, "rb", buffering=2**20)


def _zstd(path: str | Path) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise UserError(Problem(f"zstd needs zstandard: {install('prepare')}", where=str(path))) from None
    return zstandard.open(path, "rb")
