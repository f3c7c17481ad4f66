"""Being told to stop: SIGTERM, SIGUSR1 (which Slurm sends ahead of the end) or SIGINT ask for a last checkpoint.

The signal may reach the process that started the ranks, which passes it on, or any one rank. A rank only takes note; the wish
travels with a sum that every step makes anyway, so all ranks end after the same step, save, and exit with code 75, "try again
later" in sysexits.h. Where nothing can be saved yet, before the first step, or a second SIGINT comes, the process ends at once.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PREEMPTED = 75
"""Exit code of a run that was told to stop and can go on later (EX_TEMPFAIL)."""


class Preempted(Exception):
    """Raised when a run ends because it was told to."""


class StopRequest:
    """While it is open, signals are taken note of; `wanted` says whether one has come, `since` when."""

    def __init__(self) -> None:
        self.wanted = False
        self.since = 0.0
        self.training = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.wanted:
            self.wanted, self.since = True, time.monotonic()
        if not self.training:
            raise Preempted("told to stop before the first step")
