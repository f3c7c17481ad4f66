"""The server's limits on bytes, time, connections and work. Everything that a client can make grow has a line here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a server."""

    body_bytes: int = 8 * 2**20
    """Of a request's body."""
    head_bytes: int = 64 * 2**10
    """Of a request's first line and headers."""
    head_seconds: float = 20.0
    """From a connection's first byte, or from its opening, to the end of a request's headers."""
    body_seconds: float = 60.0
    """From the end of the headers to the end of the body."""
    idle_seconds: float = 30.0
    """Between two requests on a connection."""
    stalled_seconds: float = 60.0
    """How long a client may leave an answer unread, once the buffers in between are full."""
    connections: int = 4096
    waiting: int = 1024
    """Requests that wait for their first token; further ones are told to retry later."""
    choices: int = 128
    """Answers of one request: prompts times `n`."""
    stops: int = 16
    """Stop strings of a request."""
    drain_seconds: float = 60.0
    """How long a server that was told to end waits for its running requests."""
