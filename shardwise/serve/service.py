"""An engine in a thread of its own, for an asyncio program: requests in, outputs out.

The thread steps the engine while there is something to do, and waits for a command otherwise. What a step made crosses to the
event loop in one call, whatever the number of requests. Whoever leaves the iteration early, as a client does that goes away,
aborts its request. When the engine fails, every request that waits is told, and no other is taken.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Protocol

from shardwise.run import UserError
from shardwise.serve.request import Output, Request
from shardwise.serve.stats import Stats

LAST_SECONDS = 30.0
"""For the last step of an engine."""


class Engine(Protocol):
    """What is stepped. Only one thread calls it."""

    vocab: int
    max_tokens: int
    """Of a sequence: its prompt and its answer."""

    def add(self, request: Request) -> None:
        """Take a request; raises `UserError` if it can never run."""

    def abort(self, request_id: str) -> None:
        """Give a request up. Its pages are free at once; an output says so for each unfinished answer. Nothing happens where
        there is none of that name: it may have ended meanwhile."""

    def finish(self, request_id: str, index: int) -> None:
        """End an answer whose reader found a stop string, if it has not ended by itself; no output follows."""

    def step(self) -> list[Output]:
        """Compute once; nothing when there is nothing to do."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    def stats(self) -> Stats:
        """Figures of this moment."""


class EngineFailed(Exception):
    """The engine raised an error, and answers nothing any more."""


class Draining(Exception):
    """The service ends, and takes no more requests."""


class QueueFull(Exception):
    """So many requests wait already that another would wait too long. `seconds` later there may be room."""

    def __init__(self, waiting: int, seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting")
        self.seconds = seconds


class _Reply:
    """What one caller gets: the outputs of its requests, as they come."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.unfinished = {request.id: set(range(request.n)) for request in requests}
        self.silent = {request.id for request in requests}
        """Those without an output yet."""
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        """What was not read yet, by answer, in the order in which it came."""
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def take(self) -> Output:
        """What came of one answer since it was last read, as one output: a reader who is late catches up."""
        first, *more = self.outputs.pop(next(iter(self.outputs)))
        if not more:
            return first
        tokens = chain(first.tokens, *(each.tokens for each in more))
        logprobs = chain(first.logprobs, *(each.logprobs for each in more))
        return replace(first, tokens=tuple(tokens), logprobs=tuple(logprobs), finish=more[-1].finish)

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Service:
    """The engine's thread, and what the event loop knows of it. Everything but the thread itself runs on the loop."""

    def __init__(self, engine: Engine, max_waiting: int = 1024) -> None:
        """At most `max_waiting` requests wait for their first token."""
        self.vocab, self.max_tokens = engine.vocab, engine.max_tokens
        self.max_waiting = max_waiting
        self.stats = engine.stats()
        self.draining = False
        self.error: BaseException | None = None
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._replies: dict[str, _Reply] = {}
        self._waiting = 0
        self._started: deque[float] = deque(maxlen=64)
        """When the latest requests had their first output."""
        self._empty = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._empty.set()
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and answered."""
        return self.error is None and not self.draining

    @property
    def waiting(self) -> int:
        """Requests that have had no output yet."""
        return self._waiting

    @property
    def unfinished(self) -> int:
        """Requests that are not answered yet."""
        return len(self._replies)

    def check(self, more: int = 1) -> None:
        """Raise if so many more requests would not be taken now."""
        if self.error is not None:
            raise EngineFailed("the engine has failed; see its log") from self.error
        if self.draining:
            raise Draining("the server is shutting down")
        if self._waiting and self._waiting + more > self.max_waiting:
            raise QueueFull(self._waiting, self._seconds_to_wait())

    async def generate(self, *requests: Request) -> AsyncGenerator[Output]:
        """Outputs of requests as they come, until each has ended. Raises `UserError` if the engine cannot take one of them, and
        what `check` does. Leaving early aborts what is unfinished."""
        self.check(len(requests))
        reply = _Reply(requests)
        for request in requests:
            self._replies[request.id] = reply
            self._commands.put(partial(self._add, request))
        self._waiting += len(requests)
        self._empty.clear()
        try:
            while reply.outputs or reply.unfinished:
                if reply.outputs:
                    yield reply.take()
                elif reply.error is not None:
                    raise reply.error
                else:
                    reply.waiter = self._loop.create_future()
                    await reply.waiter
        finally:
            for request_id in [*reply.unfinished]:
                self._forget(reply, request_id)
                self._commands.put(partial(self._engine.abort, request_id))

    def finish(self, request_id: str, index: int) -> None:
        """An answer ends here: its reader found a stop string. Outputs that are here already may still follow."""
        reply = self._replies.get(request_id)
        if reply is not None and index in reply.unfinished[request_id]:
            self._commands.put(partial(self._engine.finish, request_id, index))
            self._ended(reply, request_id, index)
            reply.wake()

    async def drain(self, seconds: float) -> bool:
        """Take no more requests, and wait for those that are here; whether they ended in time. The others are aborted."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
            return True
        except TimeoutError:
            self._fail_all(Draining("the server was shut down before the answer was complete"))
            return False

    async def close(self) -> None:
        """End the thread, after the step at hand; a step that hangs is left behind."""
        self.draining = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, LAST_SECONDS)

    # On the event loop.

    def _deliver(self, outputs: list[Output], stats: Stats) -> None:
        self.stats = stats
        for output in outputs:
            reply = self._replies.get(output.request)
            if reply is None or output.index not in reply.unfinished[output.request]:
                continue  # left, or at a stop string
            if output.request in reply.silent:
                self._has_begun(reply, output.request)
            if output.finish is not None:
                self._ended(reply, output.request, output.index)
            reply.outputs.setdefault((output.request, output.index), []).append(output)
            reply.wake()

    def _refuse(self, request_id: str, error: Exception) -> None:
        if reply := self._replies.get(request_id):
            self._fail(reply, error)

    def _break(self, error: BaseException) -> None:
        self.error = error
        failed = EngineFailed("the engine has failed; see its log")
        failed.__cause__ = error
        self._fail_all(failed)

    def _fail_all(self, error: Exception) -> None:
        for reply in self._replies.values():
            self._fail(reply, error)

    def _fail(self, reply: _Reply, error: Exception) -> None:
        """Let the caller's iteration raise, which aborts what is left."""
        reply.outputs.clear()
        reply.error = error
        reply.wake()

    def _has_begun(self, reply: _Reply, request_id: str) -> None:
        reply.silent.discard(request_id)
        self._waiting -= 1
        self._started.append(time.monotonic())

    def _ended(self, reply: _Reply, request_id: str, index: int) -> None:
        reply.unfinished[request_id].discard(index)
        if not reply.unfinished[request_id]:
            self._forget(reply, request_id)

    def _forget(self, reply: _Reply, request_id: str) -> None:
        del reply.unfinished[request_id]
        del self._replies[request_id]
        if request_id in reply.silent:
            reply.silent.discard(request_id)
            self._waiting -= 1
        if not self._replies:
            self._empty.set()

    def _seconds_to_wait(self) -> float:
        """How long the queue takes, at the pace at which requests began lately."""
        if len(self._started) < 2:
            return 1.0
        pace = (self._started[-1] - self._started[0]) / (len(self._started) - 1)
        return min(60.0, max(1.0, self._waiting * pace))

    # In the engine's thread.

    def _work(self) -> None:
        try:
            while True:
                if not self._obey(wait=self._engine.idle):
                    return
                outputs = self._engine.step()
                self._tell(self._deliver, outputs, self._engine.stats())
        except BaseException as error:  # whatever it is, those who wait must hear of it
            traceback.print_exc()
            self._tell(self._break, error)

    def _obey(self, wait: bool) -> bool:
        """Carry out what was asked meanwhile; False at the end."""
        try:
            while (command := self._commands.get(block=wait)) is not None:
                command()
                wait = False
        except Empty:
            return True
        return False

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except UserError as error:
            self._tell(self._refuse, request.id, error)

    def _tell(self, function: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *values)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._commands.put(None)
