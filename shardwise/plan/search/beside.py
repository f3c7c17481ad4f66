"""Work of a search on a second core."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def cores() -> int:
    """Cores that a search may use. It forks, which is safe on Linux in a process with one Python thread and without PyTorch."""
    if sys.platform != "linux" or threading.active_count() > 1 or "torch" in sys.modules:
        return 1
    return len(os.sched_getaffinity(0))


def beside(work: Callable[[], T]) -> Callable[[], T]:
    """Starts work in a forked process; returns a function that waits for its result. Where that is not safe, or there is one core,
    or the process fails, the work is done here, when the result is asked for. The result is pickled."""
    if cores() == 1:
        return work
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of numpy's BLAS survive a fork
        child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reads)
            with open(writes, "wb") as out:
                pickle.dump(work(), out)
            code = 0
        finally:
            os._exit(code)
    os.close(writes)

    def result() -> T:
        with open(reads, "rb") as found:
            told = found.read()
        _, status = os.waitpid(child, 0)
        if status:
            return work()
        there: T = pickle.loads(told)
        return there

    return result
