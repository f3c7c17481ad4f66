"""The bytes of a profile, in blocks: from a plain or a gzipped file, whatever its name says, so that the whole text is never held.

A file that ends too early or turns to garbage gives all that came before, and then says where it stopped.
"""

from __future__ import annotations

import importlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:  # four times as fast as zlib, with the same interface; where there is no wheel of it, zlib does
    deflate: Any = importlib.import_module("isal.isal_zlib")
except ImportError:
    deflate = zlib

BLOCK = 1 << 20
_COMPRESSED_BLOCK = 1 << 18
_CAREFUL_BLOCK = 1 << 9
_GZIP = 31
_MAGIC = b"\x1f\x8b"


class Source:
    """A file's text, block by block. `problem` says afterwards what cut it short, if anything did."""

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self._file = path.open("rb")
        self._progress = progress
        zipped = self._file.peek(2)[:2] == _MAGIC
        self._blocks = self._unzipped() if zipped else iter(lambda: self._file.read(BLOCK), b"")
        self._given = 0
        """Bytes of text given since the gzip member began."""
        self._member = 0
        """Where in the file it began."""
        self.problem = ""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self) -> bytes:
        """The next block of text, b"" at the end."""
        try:
            block = next(self._blocks, b"")
        except OSError as e:
            self.problem = f"cannot be read at byte {self._file.tell()}: {e.strerror or e}"
            block = b""
        if self._progress:
            self._progress(self._file.tell())
        return block

    def _unzipped(self) -> Iterator[bytes]:
        inflate, waiting = deflate.decompressobj(_GZIP), b""
        while True:
            if inflate.eof:  # gzip files may be glued together, and padded with zeros
                waiting = inflate.unused_data or self._file.read(_COMPRESSED_BLOCK)
                if not waiting.strip(b"\0"):
                    return
                inflate, self._given, self._member = deflate.decompressobj(_GZIP), 0, self._file.tell() - len(waiting)
            waiting = waiting or self._file.read(_COMPRESSED_BLOCK)
            if not waiting:
                self.problem = f"its gzip stream ends too early, at byte {self._file.tell()} of the file"
                return
            try:
                block = bytes(inflate.decompress(waiting, BLOCK))
            except (zlib.error, deflate.error, EOFError):
                yield from self._up_to_the_damage()
                return
            waiting = inflate.unconsumed_tail
            self._given += len(block)
            if block:
                yield block

    def _up_to_the_damage(self) -> Iterator[bytes]:
        """What the failed call would have given before it failed: from the member's beginning again, in small steps, at last in
        single bytes, leaving out what was given already."""
        self._file.seek(self._member)
        inflate, skipped = zlib.decompressobj(_GZIP), self._given
        while piece := self._file.read(_CAREFUL_BLOCK):
            before = inflate.copy()
            try:
                text = inflate.decompress(piece)
            except zlib.error as e:
                start = self._file.tell() - len(piece)
                self.problem = f"its gzip stream is damaged after byte {start} of the file ({e})"
                yield _byte_by_byte(before, piece)[skipped:]
                return
            if len(text) > skipped:
                yield text[skipped:]
            skipped = max(0, skipped - len(text))


def _byte_by_byte(inflate: Any, piece: bytes) -> bytes:
    """What comes out of a piece before it fails."""
    text = b""
    for byte in piece:
        try:
            text += inflate.decompress(bytes((byte,)))
        except zlib.error:
            break
    return text


def text_size(path: Path) -> int:
    """About how many bytes of text a file holds: what gzip notes at its end, which is right for a single stream below 4 GiB."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(2) != _MAGIC or size < 18:
            return size
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")
