"""A connection that sends requests and records when the events of each answer arrive.

It is written on asyncio's transports because HTTP libraries spend more time on each event than a server needs to send it, and
would measure themselves. It reads what servers of this API send: a status, headers, and a body in chunks, of a known length, or up
to the end of the connection.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from array import array
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

DONE = b"[DONE]"
TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)": ?"[^"]')
"""The beginning of a text in an event; others have a role, the end of an answer, or the token counts."""


@dataclass
class Answer:
    """The answer to one request. Times are those of `time.perf_counter`."""

    sent: float
    times: array[float] = field(default_factory=lambda: array("d"))
    """When each event with text arrived."""
    ended: float = 0.0
    error: str = ""
    """Empty if there was none."""
    last: bytes = b""
    """The last event, which contains the token counts."""

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompt and of the answer, as counted by the server; without its count, each event with text is one."""
        try:
            usage = json.loads(self.last)["usage"]
            return int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError):
            return 0, len(self.times)


@dataclass(frozen=True)
class Address:
    """A server, by its URL."""

    host: str
    port: int
    path: str
    """The path before `/completions`."""
    secure: bool
    key: str = ""

    @classmethod
    def of(cls, url: str, key: str = "") -> Address:
        """Parse a URL with or without `/v1`; raises `ValueError` if it is not one."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f'"{url}" is no address of a server such as http://127.0.0.1:8000')
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.hostname, parts.port or (443 if secure else 80), path, secure, key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host  # IPv6
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
        return "\r\n".join([*lines, "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.status = 0
        """The status of the last answer."""
        self.body = b""
        """The body of an answer that is not a stream."""
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._open = False
        self._left: int | None = None
        """Bytes of the body that are yet to come; None: those up to the end of the connection, or chunks."""

    @classmethod
    async def to(cls, address: Address) -> Connection:
        """A new connection to a server."""
        secure = ssl.create_default_context() if address.secure else None
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(cls, address.host, address.port, ssl=secure)
        return protocol

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._open and self._answer is None

    async def ask(self, request: bytes, seconds: float) -> Answer:
        """Send a request and read its answer, which must be complete within `seconds`."""
        assert self._transport is not None
        self._answer = answer = Answer(time.perf_counter())
        self._done = asyncio.get_running_loop().create_future()
        self._buffer, self._head, self._line = b"", True, b""
        self._chunked = self._keeps = self._streams = False
        self.status, self.body = 0, b""
        self._transport.write(request)
        try:
            async with asyncio.timeout(seconds):
                await self._done
        except TimeoutError:
            answer.error = f"no complete answer after {seconds:g} s"
        finally:
            answer.ended = time.perf_counter()
            if self._answer is not None or not self._keeps:
                self.close()
            self._answer = None
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._open = False
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._open = cast(asyncio.Transport, transport), True  # uvloop's is of another class

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        if self._answer is not None and not self._head and not self._chunked and self._left is None and exc is None:
            self._complete()
        self._end(f"the connection was lost{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            return
        now = time.perf_counter()
        data = self._buffer + data if self._buffer else data
        try:
            if self._head:
                end = data.find(b"\r\n\r\n")
                if end < 0:
                    self._buffer = data
                    return
                self._read_head(data[:end])
                data = data[end + 4 :]
            self._buffer = self._chunks(data, now) if self._chunked else self._plain(data, now)
        except ValueError as e:
            self._keeps = False
            self._end(f"the answer is not HTTP: {e}")

    # The parts of an answer.

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = re.match(r"HTTP/1\.(\d) (\d{3})", first)
        if status is None:
            raise ValueError(f'it begins with "{first[:50]}"')
        self._head = False
        self.status = int(status[2])
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        self._left = None if length is None else _number(length, 10)
        words = headers.get("connection", "").lower()
        self._keeps = "keep-alive" in words if status[1] == "0" else "close" not in words
        self._streams = self.status == 200 and "event-stream" in headers.get("content-type", "")

    def _chunks(self, data: bytes, now: float) -> bytes:
        """Read complete chunks; returns the remaining bytes."""
        start = 0
        while True:
            line = data.find(b"\r\n", start)
            if line < 0:
                return data[start:]
            size = _number(data[start:line].split(b";")[0].decode("latin-1"), 16)
            end = line + 2 + size
            if len(data) < end + 2:
                return data[start:]
            if not size:
                self._complete()
                return b""
            if data[end : end + 2] != b"\r\n":
                raise ValueError("a chunk is longer than it says")
            self._events(data[line + 2 : end], now)
            start = end + 2

    def _plain(self, data: bytes, now: float) -> bytes:
        self._events(data, now)
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._complete()
        return b""

    def _events(self, part: bytes, now: float) -> None:
        answer = self._answer
        if answer is None:
            return
        if not self._streams:
            self.body += part
            return
        part = self._line + part if self._line else part
        *lines, self._line = part.split(b"\n")
        for line in lines:  # an event is one line of data
            content = line[5:].strip() if line.startswith(b"data:") else b""
            if not content or content == DONE:
                continue
            if content.startswith(b'{"error"'):
                answer.error = content[:300].decode(errors="replace")
            answer.last = content
            if TEXT.search(content):
                answer.times.append(now)

    def _complete(self) -> None:
        reason = f"status {self.status}: {self.body[:300].decode(errors='replace')}"
        self._end("" if self.status == 200 else reason)

    def _end(self, error: str) -> None:
        if self._answer is not None and self._done is not None and not self._done.done():
            self._answer.error = self._answer.error or error
            self._answer = None
            self._done.set_result(None)


def _number(text: str, base: int) -> int:
    """A number without a sign; raises `ValueError` if it is none."""
    if not re.fullmatch("[0-9a-fA-F]+", text.strip()):
        raise ValueError(f'"{text[:50]}" is no length')
    return int(text, base)
