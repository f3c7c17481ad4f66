"""Several engines behind the interface of one: each replica steps by itself, and requests are routed among them (`router.py`).

The engine of the first replica runs in a thread of this process, the others in their own processes, perhaps on other machines.
Each gets its commands over a connection, and sends its new outputs after each step.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from shardwise.run import UserError
from shardwise.serve.engine import Engine
from shardwise.serve.grammar import Form
from shardwise.serve.links import Sender
from shardwise.serve.request import Grammar, Output, Request, Stats
from shardwise.serve.router import Router

LISTEN_SECONDS = 0.002
"""How long a step waits for outputs before it looks for new requests."""
Remake = Callable[[Form, int], tuple[Grammar, ...]]
"""Makes the grammars of a form, one for each of several answers."""


class InProcess:
    """One end of a connection between threads: like a `Connection`, but objects are passed without pickling."""

    def __init__(self, pipe: Connection, sent: deque[Any], received: deque[Any]) -> None:
        self._pipe, self._sent, self._received = pipe, sent, received

    def send(self, message: Any) -> None:
        """Send an object."""
        self._sent.append(message)
        self._pipe.send_bytes(b"1")

    def recv(self) -> Any:
        """The next object that was sent, in order; waits for it."""
        self._pipe.recv_bytes()
        return self._received.popleft()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether there is an object to receive."""
        return self._pipe.poll(timeout)

    def fileno(self) -> int:
        """The file descriptor that becomes readable."""
        return self._pipe.fileno()

    def close(self) -> None:
        """Close this end; the other then reads the end of the file."""
        self._pipe.close()


Channel = Connection | InProcess


def in_process() -> tuple[InProcess, InProcess]:
    """Both ends of a new connection."""
    (one, other), here, there = Pipe(), deque[Any](), deque[Any]()
    return InProcess(one, here, there), InProcess(other, there, here)


def answer_requests(engine: Engine, channel: Channel, remake: Remake | None = None) -> None:
    """Act as a replica: run the commands of the channel and send the new outputs after each step, until told to end."""
    obeyed = 0
    while True:
        refused: list[Output] = []
        while channel.poll(None if engine.idle else 0):
            command = channel.recv()
            if command is None:
                return
            obeyed += 1
            name, *arguments = command
            if name == "add":
                refused += _add(engine, arguments[0], arguments[1], remake)
            else:
                getattr(engine, name)(*arguments)
            if engine.idle:
                break  # report it
        channel.send((refused + engine.step(), engine.stats(), obeyed))


def _add(engine: Engine, request: Request, form: Form | None, remake: Remake | None) -> list[Output]:
    """Add a request. If it can never run, which its sender has checked, returns outputs that say so."""
    if form is not None and remake is not None:
        request = replace(request, grammars=remake(form, request.n))
    try:
        engine.add(request)
    except UserError:
        return [Output(request.id, index, (), finish="abort") for index in range(request.n)]
    return []


class Replicas:
    """An engine (as `service.py` sees one) made of several."""

    def __init__(self, first: Engine, others: Sequence[Channel]) -> None:
        """`others`: connections to processes that run `answer_requests`."""
        here, there = in_process()
        self.vocab, self.max_tokens = first.vocab, first.max_tokens
        self.first = first
        self.channels: list[Channel] = [here, *others]
        self.senders = [Sender(channel.send) for channel in self.channels]
        self.router = Router(len(self.channels), first.pool.page_tokens, first.pool.pages, first.pool.prefix_cache)
        self.where: dict[str, tuple[int, set[int]]] = {}
        """The replica of each request, and its answers that have not ended."""
        self.told = [0] * len(self.channels)
        self.obeyed = [0] * len(self.channels)
        self.figures = [first.stats()] * len(self.channels)
        self._thread = threading.Thread(target=_answer_here, args=(first, there), name="replica", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Take a request; raises `UserError` if it can never run."""
        problems = self.first.reasons(request)
        if request.id in self.where:
            problems.append(f'there is a request "{request.id}" already')
        if problems:
            raise UserError(*problems)
        replica = self.router.choose(request.prompt, request.n)
        self.where[request.id] = replica, set(range(request.n))
        form = None
        if replica and request.grammars:  # a grammar holds the state of one text, and cannot be sent
            form = getattr(request.grammars[0], "form", None)
            request = replace(request, grammars=())
        self._tell(replica, "add", request, form)

    def abort(self, request_id: str) -> None:
        """Abort a request; each unfinished answer gets an output that says so."""
        if request_id in self.where:
            self._tell(self.where[request_id][0], "abort", request_id)

    def finish(self, request_id: str, index: int) -> None:
        """End an answer whose reader has seen enough, unless it has already ended; no output follows."""
        if request_id in self.where:
            self._tell(self.where[request_id][0], "finish", request_id, index)
            self._ended(request_id, index)

    def warm(self) -> None:
        """Nothing to do: every replica warms up by itself, before it becomes one of several."""

    def step(self) -> list[Output]:
        """The new outputs of all replicas, or nothing after a short wait."""
        found: list[Output] = []
        files = {channel.fileno(): replica for replica, channel in enumerate(self.channels)}
        for file in wait(list(files), LISTEN_SECONDS):
            assert isinstance(file, int)
            replica = files[file]
            try:
                while self.channels[replica].poll():
                    outputs, self.figures[replica], self.obeyed[replica] = self.channels[replica].recv()
                    found += self._news(outputs)
            except (EOFError, OSError):
                raise RuntimeError(f"replica {replica} has ended") from None
        return found

    def _news(self, outputs: list[Output]) -> list[Output]:
        """The outputs of answers that had not ended."""
        found = [output for output in outputs if output.index in self.where.get(output.request, (0, set()))[1]]
        for output in found:
            if output.finish is not None:
                self._ended(output.request, output.index)
        return found

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.where and self.told == self.obeyed

    def stats(self) -> Stats:
        """The summed statistics of all replicas."""
        return Stats.together(self.figures)

    def close(self) -> None:
        """Tell the replicas to end."""
        for sender in self.senders:
            sender.send(None)
            sender.end()
        with suppress(RuntimeError):  # one has ended already
            while any(thread.is_alive() for thread in (self._thread, *self.senders)):
                self.step()

    def _tell(self, replica: int, *command: Any) -> None:
        self.told[replica] += 1
        self.senders[replica].send(command)

    def _ended(self, request_id: str, index: int) -> None:
        replica, unfinished = self.where.get(request_id, (0, set()))
        if index in unfinished:
            unfinished.discard(index)
            self.router.ended(replica)
            if not unfinished:
                del self.where[request_id]


def _answer_here(engine: Engine, channel: InProcess) -> None:
    try:
        answer_requests(engine, channel)
    except BaseException:  # whatever it is, the other end must notice
        traceback.print_exc()
        channel.close()
