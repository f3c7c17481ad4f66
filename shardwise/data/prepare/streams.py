"""Opens compressed files as streams: gzip, bzip2, xz and zstd. Several compressed parts in one file are read one after
another."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Any

from shardwise.run.problems import Problem, UserError, install

COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}


def broken() -> tuple[type[Exception], ...]:
    """The exceptions that reading a damaged file raises."""
    found: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)
    try:
        from zstandard import ZstdError
    except ModuleNotFoundError:
        return found
    return (*found, ZstdError)


def open_stream(path: str | Path, compression: str) -> IO[bytes]:
    """A stream of a file's decompressed bytes; compression "" is none."""
    if compression == "gzip":
        return gzip.open(path)  # type: ignore[return-value]
    if compression == "bzip2":
        return bz2.open(path)
    if compression == "xz":
        return lzma.open(path)
    if compression == "zstd":
        return _zstd(path)
    return open(path, "rb", buffering=2**20)


def _zstd(path: str | Path) -> IO[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise UserError(Problem(f"zstd needs zstandard: {install('prepare')}", where=str(path))) from None
    return io.BufferedReader(_Frames(path, zstandard.ZstdDecompressor()), 2**17)


class _Frames(io.RawIOBase):
    """The frames of a zstd file, one after another. The library's own reader does not notice a truncated file."""

    def __init__(self, path: str | Path, library: Any) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._library = library
        self._frame: Any = None
        self._packed = b""
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, target: Any) -> int:
        while not self._held:
            self._packed = self._packed or self._file.read(2**14)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._library.decompressobj()
            self._held = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(target), len(self._held))
        target[:count] = self._held[:count]
        self._held = self._held[count:]
        return count
