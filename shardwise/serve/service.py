"""An engine in its own thread, for an asyncio program: requests in, outputs out.

The thread steps the engine while there is work, and otherwise waits for a command. All outputs of a step cross to the event loop
in one call, whatever the number of requests. A caller that leaves the iteration early, for instance because its client
disconnects, aborts its request. When the engine fails, every waiting request gets the error, and no new ones are accepted.
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
from shardwise.serve.request import Output, Request, Stats

LAST_SECONDS = 30.0
"""Time limit for the engine's last step."""


class Engine(Protocol):
    """The engine's interface. Only one thread calls it."""

    vocab: int
    max_tokens: int
    """Of a sequence: prompt and answer together."""

    def add(self, request: Request) -> None:
        """Take a request; raises `UserError` if it can never run."""

    def abort(self, request_id: str) -> None:
        """Abort a request. Its pages are free at once; each unfinished answer gets an output that says so. An unknown id is
        ignored: the request may have ended meanwhile."""

    def finish(self, request_id: str, index: int) -> None:
        """End an answer whose reader found a stop string, unless it has already ended; no output follows."""

    def step(self) -> list[Output]:
        """Compute one step; returns nothing if there is no work."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    def stats(self) -> Stats:
        """Current statistics."""


class EngineFailed(Exception):
    """The engine raised an error and no longer answers."""


class Draining(Exception):
    """The service is shutting down and accepts no more requests."""


class QueueFull(Exception):
    """Too many requests are waiting already. There may be room after `seconds`."""

    def __init__(self, waiting: int, seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting")
        self.seconds = seconds


class _Reply:
    """The outputs of one caller's requests, as they arrive."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.unfinished = {request.id: set(range(request.n)) for request in requests}
        self.silent = {request.id for request in requests}
        """Requests without an output yet."""
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        """Unread outputs by answer, in order of arrival."""
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def take(self) -> Output:
        """All unread outputs of one answer, merged into one, so that a slow reader catches up."""
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
    """The engine's thread, and the event loop's view of it. Everything but the thread itself runs on the loop."""

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
        self.waiting = 0
        """Requests without an output yet."""
        self._started: deque[float] = deque(maxlen=64)
        """When the latest requests got their first output."""
        self._empty = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._empty.set()
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted and answered."""
        return self.error is None and not self.draining

    @property
    def unfinished(self) -> int:
        """Requests that are not completely answered yet."""
        return len(self._replies)

    def check(self, more: int = 1) -> None:
        """Raise if this number of further requests would be refused now."""
        if self.error is not None:
            raise EngineFailed("the engine has failed; see its log") from self.error
        if self.draining:
            raise Draining("the server is shutting down")
        if self.waiting and self.waiting + more > self.max_waiting:
            raise QueueFull(self.waiting, self._seconds_to_wait())

    async def generate(self, *requests: Request) -> AsyncGenerator[Output]:
        """The outputs of requests as they arrive, until all have ended. Raises `UserError` if the engine cannot run one of them,
        and the errors of `check`. Leaving early aborts unfinished requests."""
        self.check(len(requests))
        reply = _Reply(requests)
        for request in requests:
            self._replies[request.id] = reply
            self._commands.put(partial(self._add, request))
        self.waiting += len(requests)
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
        """End an answer whose reader found a stop string. Outputs that have already arrived may still follow."""
        reply = self._replies.get(request_id)
        if reply is not None and index in reply.unfinished[request_id]:
            self._commands.put(partial(self._engine.finish, request_id, index))
            self._ended(reply, request_id, index)
            reply.wake()

    async def drain(self, seconds: float) -> bool:
        """Accept no more requests and wait for the current ones; returns whether they ended in time. The rest are aborted."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
            return True
        except TimeoutError:
            self._fail_all(Draining("the server was shut down before the answer was complete"))
            return False

    async def close(self) -> None:
        """End the thread after its current step; a step that hangs is abandoned."""
        self.draining = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, LAST_SECONDS)

    # On the event loop.

    def _deliver(self, outputs: list[Output], stats: Stats) -> None:
        self.stats = stats
        for output in outputs:
            reply = self._replies.get(output.request)
            if reply is None or output.index not in reply.unfinished[output.request]:
                continue  # the client left, or a stop string ended the answer
            if output.request in reply.silent:
                reply.silent.discard(output.request)
                self.waiting -= 1
                self._started.append(time.monotonic())
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
        """Make the caller's iteration raise, which aborts its unfinished requests."""
        reply.outputs.clear()
        reply.error = error
        reply.wake()

    def _ended(self, reply: _Reply, request_id: str, index: int) -> None:
        reply.unfinished[request_id].discard(index)
        if not reply.unfinished[request_id]:
            self._forget(reply, request_id)

    def _forget(self, reply: _Reply, request_id: str) -> None:
        del reply.unfinished[request_id]
        del self._replies[request_id]
        if request_id in reply.silent:
            reply.silent.discard(request_id)
            self.waiting -= 1
        if not self._replies:
            self._empty.set()

    def _seconds_to_wait(self) -> float:
        """Estimated wait in the queue, at the rate at which the latest requests started."""
        if len(self._started) < 2:
            return 1.0
        pace = (self._started[-1] - self._started[0]) / (len(self._started) - 1)
        return min(60.0, max(1.0, self.waiting * pace))

    # In the engine's thread.

    def _work(self) -> None:
        try:
            while True:
                if not self._obey(wait=self._engine.idle):
                    return
                outputs = self._engine.step()
                self._tell(self._deliver, outputs, self._engine.stats())
        except BaseException as error:  # whatever it is, waiting callers must get it
            traceback.print_exc()
            self._tell(self._break, error)

    def _obey(self, wait: bool) -> bool:
        """Run the queued commands; False if the last one ends the thread."""
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
        except RuntimeError:  # the loop is closed: nobody reads outputs any more
            self._commands.put(None)
