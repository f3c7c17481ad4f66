"""Reads records of web archives (ISO 28500, WARC 1.0 and 1.1) in one pass: pages of `response` records, texts of `conversion`
records (WET files). Where no valid record begins, the reader skips to the next one, so one broken record loses only itself."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

_START = b"WARC/1."
_HEAD = 2**16
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.IGNORECASE)


@dataclass(slots=True)
class Record:
    """One record. `text` is None if it holds neither a page nor a text."""

    place: int
    size: int
    wrong: str = ""
    text: bytes | None = None
    form: str = "html"
    url: str = ""
    charset: str = ""


class _Source:
    """A stream that tracks its position."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.at = stream, 0

    def line(self) -> bytes:
        found = self.stream.readline(_HEAD)
        self.at += len(found)
        return found

    def read(self, size: int) -> bytes:
        parts = []
        while size and (block := self.stream.read(size)):
            parts.append(block)
            size -= len(block)
            self.at += len(block)
        return b"".join(parts)

    def skip(self, size: int) -> int:
        """Skip bytes; returns how many were missing."""
        while size and (block := self.stream.read(min(size, 2**20))):
            size -= len(block)
            self.at += len(block)
        return size


def records(stream: IO[bytes], longest: int) -> Iterator[Record]:
    """All records that may hold text, and those that are broken or longer than `longest`."""
    source = _Source(stream)
    lost = -1  # where bytes outside any record began
    while line := source.line():
        if not line.startswith(_START):
            if line.strip() and lost < 0:
                lost = source.at - len(line)
            continue
        place = source.at - len(line)
        if lost >= 0:
            yield Record(lost, place - lost, wrong="not a WARC record")
            lost = -1
        fields = _fields(source)
        length = fields.get("content-length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 19):  # fits in 64 bits
            yield Record(place, source.at - place, wrong="a WARC record without a length")
            continue
        yield from _record(source, place, fields, int(length), longest)
    if lost >= 0:
        yield Record(lost, source.at - lost, wrong="not a WARC record")


def _fields(source: _Source) -> dict[str, str]:
    found = {}
    while (line := source.line()).strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        found[name.strip().lower()] = value.strip()
    return found


def _record(source: _Source, place: int, fields: dict[str, str], length: int, longest: int) -> Iterator[Record]:
    kind, form = fields.get("warc-type", ""), fields.get("content-type", "").lower()
    wanted = (kind == "response" and form.startswith("application/http")) or (kind == "conversion" and "text" in form)
    if not wanted or length > longest:
        missing = source.skip(length)
        if missing or wanted:
            yield Record(place, source.at - place, wrong="a WARC record cut short" if missing else "long")
        return
    body = source.read(length)
    record = Record(place, source.at - place, url=fields.get("warc-target-uri", "").strip("<>"))
    if len(body) < length:
        record.wrong = "a WARC record cut short"
    elif kind == "conversion":
        record.text, record.form = body, "text"
    else:
        _http(body, record, longest)
    yield record


def _http(body: bytes, record: Record, longest: int) -> None:
    """Put the page of an HTTP response into `record`, decompressed and with its declared character set."""
    head, _, payload = body.partition(b"\r\n\r\n")
    status, _, rest = head.partition(b"\r\n")
    words = status.split(None, 2)
    fields = dict(line.lower().split(b":", 1) for line in rest.split(b"\r\n") if b":" in line)
    form = fields.get(b"content-type", b"text/html").strip()
    if len(words) < 2 or words[1] != b"200" or not (b"html" in form or form.startswith(b"text/plain")):
        return
    encoding = fields.get(b"content-encoding", b"").strip()
    if fields.get(b"transfer-encoding", b"").strip() == b"chunked":
        payload = _unchunked(payload)
    if encoding in (b"gzip", b"x-gzip", b"deflate"):
        try:
            payload = zlib.decompressobj(wbits=47).decompress(payload, longest + 1)
        except zlib.error:
            record.wrong = "a page whose compression is broken"
            return
        if len(payload) > longest:
            record.wrong = "long"
            return
    elif encoding not in (b"", b"identity"):
        record.wrong = f'a page compressed as "{encoding.decode("latin-1")}", which is not read here'
        return
    record.text = payload
    record.form = "text" if form.startswith(b"text/plain") else "html"
    declared = _CHARSET.search(form) or _CHARSET.search(payload[:2048])
    record.charset = declared[1].decode("ascii").lower() if declared else ""


def _unchunked(data: bytes) -> bytes:
    """The body of an HTTP response in chunks. Crawlers often join the chunks but keep the header; such a body is returned as
    is."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = data.find(b"\r\n", at, at + 32)
        size = data[at:end].split(b";")[0].strip() if end >= 0 else b""
        if not _SIZE.fullmatch(size):  # int() also takes a sign, and a negative size would never end
            return data
        length = int(size, 16)
        if not length:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + length])
        at = end + 2 + length + 2
