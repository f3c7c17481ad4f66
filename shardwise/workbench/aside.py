"""Slow questions are answered in separate processes, one for each kind of question, at low priority, so that the page's controls
respond meanwhile. Only the newest question of a kind matters; an older one is abandoned and its process killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import sys
import threading
from typing import Any

KINDS = ("changes", "ranking")
LONGEST = 16 * 2**20
"""The largest answer, in bytes."""

ENDED = {"problems": [{"key": "", "message": "the process that looked for this ended; is memory full?"}]}
"""The answer if the process ended by itself."""


class Aside:
    """The process of one kind of question."""

    def __init__(self, kind: str) -> None:
        self._kind, self._asked, self._busy = kind, 0, False
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, given: dict[str, str], changes: dict[str, str]) -> dict[str, Any] | None:
        """The answer, or None if a newer question came before it was ready."""
        self._asked += 1
        mine = self._asked
        if self._busy and self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the question before this one has already killed it
                self._process.kill()
        async with self._lock:
            if mine != self._asked:
                return None
            self._busy = True
            try:
                process = await self._started()
                if mine != self._asked:
                    return None
                found = await self._answered(process, {"kind": self._kind, "given": given, "changes": changes})
                return ENDED if found is None and mine == self._asked else found
            finally:
                self._busy = False

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=LONGEST,
            )
        return self._process

    async def _answered(self, process: asyncio.subprocess.Process, question: dict[str, Any]) -> dict[str, Any] | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (ConnectionError, ValueError):
            line = b""
        if not line:
            await process.wait()
            self._process = None
            return None
        return json.loads(line)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question; the mistakes in a question are an answer, too."""
    from shardwise.run import UserError
    from shardwise.workbench.changes import faster_changes, memory_error, ranking
    from shardwise.workbench.question import Base, problems_of

    base, changes = Base(question["given"]), question["changes"]
    try:
        if question["kind"] == "ranking":
            return ranking(base, changes)
        return {"changes": faster_changes(base, changes), "memory_error": memory_error()}
    except UserError as e:
        return problems_of(e)
    except (ArithmeticError, LookupError, ValueError) as e:
        return problems_of(UserError(f"the planner has no answer to this: {e}"))


def main() -> None:
    """Answer lines of JSON until the input ends, because the server has ended; unfinished work is then abandoned."""
    os.nice(10)
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        print(json.dumps(answer(json.loads(asked.get()))), flush=True)


def _listen(asked: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
