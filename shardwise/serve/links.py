"""How the ranks of a server reach each other besides collectives: the first rank of each replica tells its others what to compute,
and the first of all tells the replicas what to answer.

Connections and not collectives, because a server may have nothing to say for days, and because the end of a process ends them: a
rank that is lost is known at once, also where a collective would wait for it. The ranks find each other through their process
group, which also brings the key that lets them in.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener, wait

import torch.distributed as dist

from shardwise.run.served import ServingRank

END = "end"


class Links:
    """The connections of this rank. Every rank makes them, at the same time."""

    def __init__(self, place: ServingRank, meet: str) -> None:
        """`meet` is where the ranks met first, an address that all of them reach."""
        self.place, world = place, place.layout.world
        self.followers: list[Connection] = []
        """Of the first rank of a replica: to its others."""
        self.leader: Connection | None = None
        """Of those: to the first."""
        self.replicas: list[Connection] = []
        """Of the first rank of all: to the first of each other replica, in order."""
        self.requests: Connection | None = None
        """Of those: to the first of all."""
        self._lives: dict[int, Connection] = {}
        leads, first = place.rank == place.leader, place.rank == 0
        key = secrets.token_bytes(32)
        listener = Listener((_own_address(meet), 0), backlog=2 * world, authkey=key) if leads else None
        addresses: list[tuple[tuple[str, int], bytes] | None] = [None] * world
        mine = (listener.address, key) if listener is not None else None
        dist.all_gather_object(addresses, mine)

        def call(rank: int, word: str) -> Connection:
            where = addresses[rank]
            assert where is not None
            connection = Client(where[0], authkey=where[1])
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
        """Said by the first rank: all is done, and that a rank ends from now on is no fault."""
        self._ending = True
        for connection in self._lives.values():
            connection.send(END)

    def _watch(self) -> None:
        """End this process when another has ended that it cannot do without, whatever this one waits for."""
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


def _sent_at_once(connection: Connection) -> Connection:
    """Small messages are not to wait for the acknowledgement of those before them."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def lowest(values: Sequence[int]) -> list[int]:
    """The lowest of each number over all ranks."""
    import torch

    made = torch.tensor(values)
    dist.all_reduce(made, op=dist.ReduceOp.MIN)
    return made.tolist()
