"""Streams the text of a profile block by block and splits it into batches of events, so the whole text is never in memory. Files
may be plain or gzipped, whatever their name. A truncated or corrupt file yields every event before the damage, and its position.

A batch of a few megabytes is cut where one event seems to end and the next to begin, and decoded. If the decoder accepts it, the
cut was right. If not (the list ended, a string looks like an end, the text is corrupt), brackets are counted.
"""

from __future__ import annotations

import importlib
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from shardwise.trace.reading.records import MALFORMED, Problems, Record, raw_list, read_one, record_list, repair

try:  # four times as fast as zlib, with the same interface, but not on every platform
    deflate: Any = importlib.import_module("isal.isal_zlib")
except ImportError:
    deflate = zlib

BLOCK = 1 << 20
_COMPRESSED_BLOCK = 1 << 18
_CAREFUL_BLOCK = 1 << 9
_GZIP = 31
_MAGIC = b"\x1f\x8b"


class Source:
    """A file's text, block by block. After the end `problem` says what cut it short, "" if nothing."""

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self._file = path.open("rb")
        self._progress = progress
        zipped = self._file.peek(2)[:2] == _MAGIC
        self._blocks = self._unzipped() if zipped else iter(lambda: self._file.read(BLOCK), b"")
        self._given = 0
        """Bytes of this gzip member decompressed so far."""
        self._member = 0
        """Offset of the member in the file."""
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
            if inflate.eof:  # gzip files may be concatenated, and padded with zeros
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
        """The rest of the text before the damage: decompresses the member again in small chunks, the damaged one byte by byte."""
        self._file.seek(self._member)
        inflate, skipped = zlib.decompressobj(_GZIP), self._given
        while chunk := self._file.read(_CAREFUL_BLOCK):
            before = inflate.copy()
            try:
                text = inflate.decompress(chunk)
            except zlib.error as e:
                start = self._file.tell() - len(chunk)
                self.problem = f"its gzip stream is damaged after byte {start} of the file ({e})"
                yield _byte_by_byte(before, chunk)[skipped:]
                return
            if len(text) > skipped:
                yield text[skipped:]
            skipped = max(0, skipped - len(text))


def _byte_by_byte(inflate: Any, chunk: bytes) -> bytes:
    """The text of a chunk up to the damage."""
    text = b""
    for byte in chunk:
        try:
            text += inflate.decompress(bytes((byte,)))
        except zlib.error:
            break
    return text


def text_size(path: Path) -> int:
    """Approximate bytes of text in a file. For gzip this is its trailer, exact for a single stream below 4 GiB."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(2) != _MAGIC or size < 18:
            return size
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(4), "little")


LARGEST = 1 << 24
"""Limit in bytes of one event, and of the text before or after the events; what is larger is skipped and reported."""

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_KEY_LENGTH = 1 << 12  # of a key with colon and spaces
_SPACE = re.compile(rb"[\s,]*")
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_LAST = re.compile(rb"\}\s*\]")
_TAIL_WINDOWS = (1 << 14, 1 << 18, LARGEST)
_TRIES = 4
_FAILURES = 8
_NEAR = 1 << 15
_BRACKET_OR_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+"|[\[\]{}"]', re.DOTALL)
_EVENT_OR_END = re.compile(rb'\{\s*"(?:ph|name|cat|pid|tid|ts|id|args)"\s*:|\]\s*(?:,\s*"|\}\s*$)')


class Text:
    """The text of a profile. After `records` is exhausted, `head` and `tail` hold the members around the events, as JSON."""

    def __init__(self, source: Source, problems: Problems) -> None:
        self._source = source
        self._problems = problems
        self._buffer = b""
        self._ended = False
        self.position = 0
        """Byte of the text where the buffer begins."""
        self.head = b""
        self.tail = b""
        self.is_other_json = False
        """The text is an object without events."""

    def begin(self) -> str:
        """Go to the first event. Returns "", or the reason why there is none."""
        self._more()
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            self._drop(3)
        first = self._skip_space()
        if not first:
            return "is empty"
        if first == b"[":
            self._drop(1)
            return ""
        if first != b"{":
            return f"is not a profile: it begins with {bytes(self._buffer[:12])!r}, which is not JSON"
        head: bytes | None = b""
        while not (found := _EVENTS.search(self._buffer)):
            passed = len(self._buffer) - _KEY_LENGTH
            if passed > 0:
                head = head + self._buffer[:passed] if head is not None and len(head) < LARGEST else None
                self._drop(passed)
            if not self._more():
                self.is_other_json = not self._source.problem
                return "is not a profile: it has no list of traceEvents"
        if head is None:
            self._problems.add(f"the text before its events, up to byte {self.position}, is too large and was not read")
        else:
            self.head = (head + self._buffer[: found.start()]).rstrip().rstrip(b",") + b"}"
        self._drop(found.end())
        return ""

    def records(self) -> Iterator[tuple[int, list[Record]]]:
        """Batches of events, each with the byte where it begins."""
        wanted = BLOCK
        while True:
            while len(self._buffer) < wanted and self._more():
                pass
            wanted = BLOCK
            first = self._skip_space()
            if not first:
                self._truncated("before its list of events does")
                return
            if first == b"]":
                break
            position = self.position
            quick = self._decode()
            if quick is None:
                self._buffer = repair(self._buffer)
                quick = self._decode()
            if quick is not None:
                records, count, over = quick
            else:
                records, count, over = self._walk()
                if not count and not self._ended:  # an event larger than the buffer
                    wanted = 2 * len(self._buffer)
                    continue
                if not count:
                    self._truncated("in the middle of an event")
                    return
            self._drop(_after_space(self._buffer, count))
            yield position, records
            if over:
                break
        self._finish()

    def skip(self, position: int) -> bool:
        """Go to the first cut at or after a byte, with the same cuts as in `records`; False if there is none."""
        while self.position < position:
            while len(self._buffer) < BLOCK and self._more():
                pass
            self._skip_space()
            cuts = self._cuts()
            if not cuts or self._ended:
                return False
            self._drop(_after_space(self._buffer, cuts[-1] + 1))
        return True

    def _finish(self) -> None:
        """Read the text after the events."""
        if self._buffer.startswith(b"]"):
            self._drop(1)
        while len(self._buffer) <= LARGEST and self._more():
            pass
        if len(self._buffer) > LARGEST:
            self._problems.add(
                f"the text after its events, from byte {self.position} on, is too large and was not read"
            )
            self._buffer = b""
        rest = _SPACE.sub(b"", self._buffer, count=1)
        self.tail = b"{" + rest if rest.startswith(b'"') else b""
        if self._source.problem:
            self._problems.add(self._source.problem)

    def _truncated(self, where: str) -> None:
        problem = self._source.problem
        because = f": {problem}" if problem else "; it seems cut off"
        self._problems.add(f"ends {where}, at byte {self.position + len(self._buffer)} of the text{because}")

    def _decode(self) -> tuple[list[Record], int, bool] | None:
        """Events at the start of the buffer, their size in bytes, and whether the list ended there; None if no cut is right."""
        for cut in self._cuts()[: -_TRIES - 1 : -1]:
            if (records := self._list(cut + 1)) is not None:
                return records, cut + 1, False
        for number, found in enumerate(_LAST.finditer(self._buffer)):
            if number == _TRIES:
                break
            if (records := self._list(found.start() + 1)) is not None:
                return records, found.end(), True
        return None

    def _cuts(self) -> list[int]:
        """Possible ends of events near the end of the buffer."""
        for window in _TAIL_WINDOWS:
            begin = max(0, len(self._buffer) - window)
            cuts = [found.start() for found in _BETWEEN.finditer(self._buffer, begin)]
            if cuts:
                return cuts
        return []

    def _list(self, end: int) -> list[Record] | None:
        """The first bytes of the buffer as a list of events; None if they are not JSON."""
        text = b"".join((b"[", memoryview(self._buffer)[:end], b"]"))
        try:
            return record_list.decode(text)
        except msgspec.ValidationError:
            pass  # JSON, but some fields have wrong types
        except MALFORMED:
            return None
        try:
            elements = raw_list.decode(text)
        except MALFORMED:
            return None
        records = []
        for element in elements:
            record, reason, _ = read_one(bytes(element))
            if record is not None:
                records.append(record)
            if reason:
                self._problems.count(f"could not be read: {reason}", self.position)
        return records

    def _walk(self) -> tuple[list[Record], int, bool]:
        """Events at the start of the buffer, one by one, without malformed ones; the bytes consumed; whether the list ended."""
        records: list[Record] = []
        at = failures = 0
        while True:
            at = _after_space(self._buffer, at)
            if at >= len(self._buffer) or self._buffer[at : at + 1] == b"]":
                return records, at, at < len(self._buffer)
            # With unbalanced quotes every event seems to reach the end, so after some failures only a short window is searched.
            stop = len(self._buffer) if failures < _FAILURES else min(at + _NEAR, len(self._buffer))
            end = _end_of_object(self._buffer, at, stop) if self._buffer[at : at + 1] == b"{" else 0
            if end <= 0:
                following = _EVENT_OR_END.search(self._buffer, at + 1)
                unfinished = len(self._buffer) - at <= LARGEST if not self._ended else not following
                if end < 0 and stop == len(self._buffer) and unfinished:
                    return records, at, False  # the rest of it is not read yet, or truncated
                failures += 1
                what = "could not be read: no end found" if end < 0 else "could not be read: not an object"
                self._problems.count(what, self.position + at)
                if not following:
                    return records, max(at + 1, len(self._buffer) - (0 if self._ended else _KEY_LENGTH)), False
                at = following.start()
                continue
            record, reason, is_json = read_one(self._buffer[at:end])
            if record is not None:
                records.append(record)
            if reason:
                self._problems.count(f"could not be read: {reason}", self.position + at)
            failures += not is_json
            following = None if is_json else _EVENT_OR_END.search(self._buffer, at + 1, end)
            at = following.start() if following else end

    def _more(self) -> bool:
        block = b"" if self._ended else self._source.read()
        self._ended = not block
        self._buffer += block
        return not self._ended

    def _drop(self, count: int) -> None:
        if count:
            self._buffer = self._buffer[count:]
            self.position += count

    def _skip_space(self) -> bytes:
        """Drop spaces and commas. Returns the next byte, b"" at the end."""
        while True:
            self._drop(_after_space(self._buffer, 0))
            if self._buffer or not self._more():
                return self._buffer[:1]


def _after_space(text: bytes, at: int) -> int:
    """Position of the next byte that is neither space nor comma."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _end_of_object(text: bytes, start: int, stop: int) -> int:
    """End of the object that begins at `start`; -1 if it is not before `stop`."""
    depth = 0
    for found in _BRACKET_OR_STRING.finditer(text, start, stop):
        token = found[0]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if not depth:
                return found.end()
        elif token == b'"':
            return -1
    return -1
