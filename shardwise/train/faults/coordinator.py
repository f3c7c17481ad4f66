"""The coordinator of replicas that come and go: it listens for their ranks, and answers what `membership.py` decides.

A message is a line of JSON. Where a connection ends, its replica has left, whatever became of it: so the machine of another command
needs no agreement about who is alive. Beside it there is PyTorch's store, where the members of a group find each other.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.train.faults.membership import Gone, Membership


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, membership: Membership) -> None:
        super().__init__((address, 0), _Handler)
        self.membership = membership


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        membership, who = self.server.membership, None
        try:
            while line := self.rfile.readline():
                message = json.loads(line)
                who = message["replica"], message["start"]
                answer = membership.ask(message, self._check)
                self.wfile.write(json.dumps(answer).encode() + b"\n")
        except (Gone, OSError, ValueError, KeyError, IndexError):
            pass
        if who is not None:
            membership.leave(*who)

    def _check(self) -> None:
        """Raise if the rank that waits for an answer is gone."""
        try:
            if not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise ConnectionError
        except BlockingIOError:
            pass


class Coordinator:
    """Listens from now on, until it is closed."""

    def __init__(self, replicas: int, ranks: int, say: Callable[..., None], address: str = "127.0.0.1") -> None:
        self.membership = Membership(replicas, ranks, say)
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._server = _Server(address, self.membership)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="coordinator", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
