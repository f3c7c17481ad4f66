"""The bytes of a profile, in blocks: from a plain or a gzipped file, whatever its name says, so that the whole text is never held.

A file that ends too early or turns to garbage gives all that came before, and then says where it stopped.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:  # four times as fast as zlib, with the same interface; where there is no wheel of it, zlib does
    deflate: Any = importlib.import_module("isal.isal_zlib")
except ImportError:
    deflate = zlib

BLOCK = 1 << 20
_COMPRESSED_BLOCK = 1 << 18
_GZIP = 31
_MAGIC = b"\x1f\x8b"


class Source:
    """A file's text, block by block. `problem` says afterwards what cut it short, if anything did."""

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self._file = path.open("rb")
        self._progress = progress
        self._zipped = self._file.peek(2)[:2] == _MAGIC
        self._inflate: Any = deflate.decompressobj(_GZIP) if self._zipped else None
        self._waiting = b""
        self._ended = False
        self._members = 0
        self.problem = ""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self) -> bytes:
        """The next block of text, b"" at the end."""
        if self._ended:
            return b""
        try:
            block = self._unzip() if self._zipped else self._file.read(BLOCK)
        except (zlib.error, deflate.error, EOFError) as e:
            self.problem = f"its gzip stream is damaged before byte {self._file.tell()} of the file ({e})"
            block = b""
        except OSError as e:
            self.problem = f"cannot be read at byte {self._file.tell()}: {e.strerror or e}"
            block = b""
        self._ended = not block
        if self._progress:
            self._progress(self._file.tell())
        return block

    def _unzip(self) -> bytes:
        while True:
            if self._inflate.eof:  # gzip files may be glued together
                rest = self._inflate.unused_data or self._file.read(_COMPRESSED_BLOCK)
                if not rest.lstrip(b"\0"):
                    return b""
                self._inflate, self._waiting = deflate.decompressobj(_GZIP), rest
                self._members += 1
            if not self._waiting:
                self._waiting = self._file.read(_COMPRESSED_BLOCK)
                if not self._waiting:
                    self.problem = f"its gzip stream ends too early, at byte {self._file.tell()} of the file"
                    return b""
            block = self._inflate.decompress(self._waiting, BLOCK)
            self._waiting = self._inflate.unconsumed_tail
            if block:
                return bytes(block)
