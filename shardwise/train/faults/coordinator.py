"""The coordinator of elastic replicas: a server that their ranks connect to, which answers with the decisions of `membership.py`.

A message is a line of JSON. When a connection ends, its replica has left, whatever the cause: so the replicas need no agreement on
which of them are alive. Beside the server runs PyTorch's store, where the members of a group find each other. On several machines
the command that can listen at `cluster.rendezvous` is the coordinator. The commands of the other machines ask it for their
machine's number, which they own as long as their connection lives, and for the state of the replicas. A machine that comes back
gets the number that is missing.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.run import Problem, Run, UserError
from shardwise.train.faults.membership import Gone, Membership, Message

JOIN_SECONDS = 600.0
"""Seconds that a machine waits for the coordinator."""
LINGER = 10.0
"""Seconds that the coordinator waits for the commands of other machines to see that the run is over."""


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    coordinator: Coordinator


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        coordinator, who = self.server.coordinator, None
        membership = coordinator.membership
        try:
            while line := self.rfile.readline():
                message = json.loads(line)
                if "rank" in message:
                    who = message["replica"], message["start"]
                    answer = membership.ask(message, self._check)
                else:
                    answer = coordinator.answer(message, self)
                self.wfile.write(json.dumps(answer).encode() + b"\n")
        except (Gone, OSError, ValueError, KeyError, IndexError):
            pass
        coordinator.free(self)
        if who is not None:
            membership.leave(*who)

    def _check(self) -> None:
        """Raise an error if the rank that waits for an answer is gone."""
        try:
            if not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise ConnectionError
        except BlockingIOError:
            pass


class Coordinator:
    """Listens from its construction until it is closed."""

    def __init__(
        self,
        replicas: int,
        ranks: int,
        say: Callable[..., None],
        at: tuple[str, int] = ("127.0.0.1", 0),
        machines: int = 1,
    ) -> None:
        self.membership = Membership(replicas, ranks, say)
        self.machine, self.machines = 0, machines
        self._claims: dict[int, object] = {0: self}
        self._claiming = threading.Lock()
        self._server = _Server(at, _Handler)
        self._server.coordinator = self
        self.address, self.port = at[0] or "127.0.0.1", self._server.server_address[1]
        self._store = TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
        self.store: int = self._store.port
        threading.Thread(target=self._server.serve_forever, name="coordinator", daemon=True).start()

    def view(self) -> Message:
        """The current state of the replicas."""
        return self.membership.view()

    def leave(self, replica: int, start: int) -> None:
        """A replica has died."""
        self.membership.leave(replica, start)

    def give_up(self, replica: int) -> None:
        """A replica will not come back."""
        self.membership.give_up(replica)

    def answer(self, message: Message, who: object) -> Message:
        """Answer the command of another machine."""
        match message["what"]:
            case "machine":
                with self._claiming:
                    free = [m for m in range(self.machines) if m not in self._claims]
                    wanted = message["machine"]
                    machine = wanted if wanted in free else free[0] if free and wanted < 0 else -1
                    if machine >= 0:
                        self._claims[machine] = who
                return dict(machine=machine, store=self.store)
            case "leave":
                self.leave(message["replica"], message["start"])
            case "give_up":
                self.give_up(message["replica"])
        return self.view()

    def free(self, who: object) -> None:
        """A connection has ended, and with it its claim on a machine's number."""
        with self._claiming:
            self._claims = {machine: claim for machine, claim in self._claims.items() if claim is not who}

    def close(self) -> None:
        """Stop answering; at the end of a run the other machines' commands have `LINGER` seconds to see it."""
        deadline = time.monotonic() + (LINGER if self.membership.over else 0.0)
        while len(self._claims) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Remote:
    """The coordinator's client in the command of another machine."""

    def __init__(self, address: str, port: int, machine: int) -> None:
        self.address, self.port = address, port
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                self._socket = socket.create_connection((address, port), timeout=JOIN_SECONDS)
                break
            except OSError as e:
                if time.monotonic() > deadline:
                    reason = f"the machines of the run did not meet at {address}:{port}: {e}"
                    raise UserError(Problem(reason, key="cluster.rendezvous")) from None
                time.sleep(0.5)
        self._file = self._socket.makefile("rb")
        answer = self._ask(what="machine", machine=machine)
        if answer["machine"] < 0:
            reason = f"all machines of the run are at {address}:{port} already"
            raise UserError(Problem(reason, key="cluster.nodes"))
        self.machine: int = answer["machine"]
        self.store: int = answer["store"]

    def _ask(self, **message: Any) -> Message:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        line = self._file.readline()
        if not line:
            raise ConnectionError(f"the command at {self.address}:{self.port}, which coordinates the replicas, is gone")
        answer: Message = json.loads(line)
        return answer

    def view(self) -> Message:
        """The current state of the replicas."""
        return self._ask(what="view")

    def leave(self, replica: int, start: int) -> None:
        """A replica has died."""
        self._ask(what="leave", replica=replica, start=start)

    def give_up(self, replica: int) -> None:
        """A replica will not come back."""
        self._ask(what="give_up", replica=replica)

    def close(self) -> None:
        """Close the connection, which frees this machine's number for another."""
        self._file.close()
        self._socket.close()


def meet(run: Run, say: Callable[..., None]) -> Coordinator | Remote:
    """Become the coordinator of a run, or connect to it: both answer the same calls."""
    lay, nodes = run.layout, run.cluster.nodes
    sizes = lay.replicate, lay.world // lay.replicate
    if nodes == 1:
        return Coordinator(*sizes, say)
    host, _, port = run.cluster.rendezvous.rpartition(":")
    # Kubernetes numbers pods; elsewhere the machine that has the address is the coordinator.
    index = os.environ.get("PET_NODE_RANK") or os.environ.get("JOB_COMPLETION_INDEX")
    if index in (None, "", "0"):
        try:
            return Coordinator(*sizes, say, ("" if index else host, int(port)), nodes)
        except OSError as e:
            if index or e.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                reason = f"nothing can listen at {run.cluster.rendezvous}: {e.strerror}"
                raise UserError(Problem(reason, key="cluster.rendezvous")) from None
    return Remote(host, int(port), int(index or -1))
