"""Signals that ask a run to stop: SIGTERM, SIGUSR1 (which Slurm sends ahead of the time limit) and SIGINT.

While a rank trains, `StopRequest` notes the signal, and the run saves after the current step. Before training there is nothing to
save: the command ends at once with a message (it calls `end_at_once` first of all). A rank keeps the default action until then,
since a Python handler would have to wait for an import, or for a process group whose other ranks never come. Only Python's own
startup, about 20 ms, comes before all this.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PREEMPTED = 75
"""Exit code of a run that was asked to stop and can be resumed later (EX_TEMPFAIL)."""


class Preempted(BaseException):
    """Raised when a run ends because it was asked to. Like KeyboardInterrupt it is not an `Exception`, which other code might
    catch."""


_decided = threading.Event()


def end_at_once(sentence: str, code: int = PREEMPTED, signals: tuple[signal.Signals, ...] = SIGNALS) -> None:
    """From here on, a signal ends this process with a message, until the outcome is decided."""

    def end(number: int, frame: FrameType | None) -> None:
        if not _decided.is_set():
            os.write(2, f"{sentence}\n".encode())
            os._exit(code)

    for number in signals:
        signal.signal(number, end)


def ignore_signals() -> None:
    """Ignore signals from here on, even while Python shuts down and restores the default actions."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def decided() -> None:
    """The run has ended and its outcome is known: from here on `end_at_once` does nothing."""
    _decided.set()


class StopRequest:
    """Between `begin` and `end` signals are noted: `wanted` tells whether one has come, `since` when."""

    def __init__(self) -> None:
        self.wanted = False
        self.since = 0.0
        self.interrupts = 0
        self._before: dict[signal.Signals, object] = {}

    def begin(self, handle: Callable[[int, FrameType | None], None] | None = None) -> None:
        """Note signals from here on; `handle` is called for them instead, and notes them itself."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, handle or self.note) for number in SIGNALS}

    def end(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. A second Ctrl-C warns that a third one ends the run without saving."""
        if not self.wanted:
            self.wanted, self.since = True, time.monotonic()
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts == 2:
                os.write(2, b"saving; a third Ctrl-C ends the run without it\n")
            elif self.interrupts > 2:
                raise KeyboardInterrupt
