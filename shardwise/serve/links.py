"""Connections between the ranks of a server besides collectives: the first rank of each replica sends its other ranks what to
compute, and rank 0 sends requests to the replicas.

They are connections and not collectives because a server may be idle for days, and because they close when a process ends: a lost
rank is noticed at once, also where a collective would wait for it. The ranks find each other through their process group, which
also distributes the key that authenticates them.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge, wait
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from shardwise.run.ranks.served import ServingRank

END = "end"
LAST = object()


class Sender(threading.Thread):
    """Sends what is in its queue, so that this end goes on reading while the other, which may itself be sending, does not."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        """`send` is the method of a connection."""
        super().__init__(name="sender", daemon=True)
        self._send = send
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.start()

    def send(self, message: Any) -> None:
        """Send a message after those before it; returns at once."""
        self._queue.put(message)

    def end(self) -> None:
        """End the thread once all is sent."""
        self._queue.put(LAST)

    def run(self) -> None:
        with suppress(OSError):  # the other end has closed, which this end notices when it reads
            for message in iter(self._queue.get, LAST):
                self._send(message)


class Links:
    """The connections of this rank. All ranks make them at the same time."""

    def __init__(self, place: ServingRank, meet: str) -> None:
        """`meet` is the address where the ranks first met, which all of them can reach."""
        self.place, world = place, place.layout.world
        self.followers: list[Connection] = []
        """On the first rank of a replica: to its other ranks."""
        self.leader: Connection | None = None
        """On those other ranks: to the first."""
        self.replicas: list[Connection] = []
        """On rank 0: to the first rank of each other replica, in order."""
        self.requests: Connection | None = None
        """On those first ranks: to rank 0."""
        self._lives: dict[int, Connection] = {}
        leads, first = place.rank == place.leader, place.rank == 0
        key = secrets.token_bytes(32)
        listener = _listen(_own_address(meet), 2 * world, key) if leads else None
        addresses: list[tuple[tuple[Any, ...], bytes] | None] = [None] * world
        mine = (listener.address, key) if listener is not None else None
        dist.all_gather_object(addresses, mine)

        def call(rank: int, word: str) -> Connection:
            where = addresses[rank]
            assert where is not None
            connection = _connect(*where)
            connection.send((word, place.rank))
            return _sent_at_once(connection)

        if not leads:
            self.leader = call(place.leader, "follow")
        elif not first:
            self.requests = call(0, "answer")
        if not first:
            self._lives[0] = call(0, "live")
        others = len(place.replica_ranks) - 1
        expected = (others if leads else 0) + (world - 1 + place.layout.replicate - 1 if first else 0)
        found: dict[str, dict[int, Connection]] = {"follow": {}, "answer": {}, "live": {}}
        for _ in range(expected):
            assert listener is not None
            connection = _sent_at_once(listener.accept())
            word, rank = connection.recv()
            found[word][rank] = connection
        if listener is not None:
            listener.close()
        self.followers = [found["follow"][rank] for rank in sorted(found["follow"])]
        self.replicas = [found["answer"][rank] for rank in sorted(found["answer"])]
        self._lives |= found["live"]
        self._ending = False
        threading.Thread(target=self._watch, name="lives", daemon=True).start()

    def close(self) -> None:
        """Called on rank 0: the server is done, and from now on the end of a rank is no error."""
        self._ending = True
        for connection in self._lives.values():
            connection.send(END)

    def _watch(self) -> None:
        """End this process when a rank that it needs has ended, whatever this process is waiting for."""
        living = {connection.fileno(): rank for rank, connection in self._lives.items()}
        while living:
            for file in wait(list(living)):
                assert isinstance(file, int)
                rank = living.pop(file)
                try:
                    ended = self._lives[rank].recv() != END
                except (EOFError, OSError):
                    ended = True
                if ended and not self._ending:
                    print(f"error: rank {rank} has ended, and the others cannot go on without it", file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(1)


def _own_address(meet: str) -> str:
    """This machine's address on the network where the ranks met."""
    family = socket.getaddrinfo(meet, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect(family[4])  # sends nothing
        return probe.getsockname()[0]


def _listen(address: str, backlog: int, key: bytes) -> Listener:
    return Listener((address, 0), "AF_INET6" if ":" in address else "AF_INET", backlog, key)


def _connect(address: tuple[Any, ...], key: bytes) -> Connection:
    """Like `multiprocessing.connection.Client`, which knows no IPv6."""
    with socket.create_connection(address[:2]) as connected:
        connection = Connection(connected.detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


def _sent_at_once(connection: Connection) -> Connection:
    """Disable Nagle's algorithm: small messages must not wait for the acknowledgement of earlier ones."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def lowest(values: Sequence[int]) -> list[int]:
    """The minimum of each number over all ranks."""
    made = torch.tensor(values)
    dist.all_reduce(made, op=dist.ReduceOp.MIN)
    return made.tolist()
