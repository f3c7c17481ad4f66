"""Rewards: plain Python functions of (prompt, completion, row), in files that the user names as `file.py:function`.

A function gets the prompt and the answer as text and the data row that the prompt came from, and returns a number. Any error inside
it becomes a message that names the file, the function and the row. A function that runs too long is interrupted by an alarm of the
operating system (SIGALRM), which reaches whatever Python is doing.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import math
import numbers
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.run import Problem, UserError
from shardwise.run.problems import nearest

RewardFunction = Callable[[str, str, dict[str, Any]], Any]
KEY = "objective.rewards"
ROW_LETTERS = 200
"""Maximum number of characters of a row or answer in a message."""


AGAIN = 1.0
"""Seconds until a function that has caught an interrupt gets another one, at the most."""


class TooLong(BaseException):
    """Raised inside a reward function that takes too long. Not an `Exception`, which the function may catch."""


@dataclass(frozen=True)
class Answered:
    """The input of a reward function: a prompt, an answer to it, and the data row of the prompt."""

    prompt: str
    completion: str
    row: dict[str, Any]


class Rewards:
    """The reward functions of a run, called in order and summed by weight."""

    def __init__(self, names: Sequence[str], weights: Sequence[float] = (), seconds: float = 10.0) -> None:
        """`seconds`: the time limit of one call."""
        self.names = metric_names(names)
        self.sources, self.seconds = tuple(names), seconds
        self.weights = np.array(weights or [1.0] * len(names), dtype=np.float64)
        self.functions = load_functions(names)

    def judge(self, answers: Sequence[Answered]) -> NDArray[np.float64]:
        """The value of each function for each answer [answers, functions]."""
        found = np.zeros((len(answers), len(self.functions)))
        for column, (source, function) in enumerate(zip(self.sources, self.functions, strict=True)):
            for row, answer in enumerate(answers):
                found[row, column] = self._call(source, function, answer)
        return found

    def total(self, judged: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weighted sum of all functions [answers]."""
        return judged @ self.weights

    def _call(self, source: str, function: RewardFunction, answer: Answered) -> float:
        row = copy.deepcopy(answer.row)  # what it changes there, the next answers must not see
        try:
            with limited(self.seconds):
                value = function(answer.prompt, answer.completion, row)
        except TooLong:
            reason = f"took longer than objective.reward_seconds = {self.seconds:g}"
            raise _mistake(source, reason, answer) from None
        except (Exception, SystemExit) as e:  # an answer that is executed may call exit()
            raise _mistake(source, f"raised {type(e).__name__}: {e}{_line_of(e, source)}", answer) from None
        try:
            found = float(value) if isinstance(value, numbers.Real) else math.nan
        except OverflowError:  # an int or a fraction, perhaps too large to be written out
            raise _mistake(source, "returned a number too large for a float", answer) from None
        if not math.isfinite(found):
            raise _mistake(source, f"returned {value!r:.80}, and a reward is a finite number", answer)
        return found


def metric_names(sources: Sequence[str]) -> tuple[str, ...]:
    """A name for the metric of each function: the function's, with its file's if others have the same, or the whole source."""
    parts = [source.rpartition(":") for source in sources]
    short = [function for _, _, function in parts]
    longer = [f"{Path(file).stem}:{function}" for file, _, function in parts]
    return tuple(
        next((name for name, all_names in ((a, short), (b, longer)) if all_names.count(name) == 1), source)
        for a, b, source in zip(short, longer, sources, strict=True)
    )


def _mistake(source: str, what: str, answer: Answered) -> UserError:
    row = json.dumps(answer.row, ensure_ascii=False, default=str)
    return UserError(
        Problem(f"{what}, on the row {_short(row)} and the answer {_short(answer.completion)!r}", KEY, source)
    )


def _short(text: str) -> str:
    return text if len(text) <= ROW_LETTERS else f"{text[:ROW_LETTERS]}…"


def _line_of(error: BaseException, source: str) -> str:
    """The line of the user's file where the error happened."""
    file = Path(source.rpartition(":")[0]).name
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == file]
    return f" (line {lines[-1]})" if lines else ""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupt the code inside this context after `seconds`, and again until it ends. Only the main thread can be interrupted; in
    other threads the time is checked afterwards."""
    if threading.current_thread() is not threading.main_thread():
        began = time.monotonic()
        yield
        if time.monotonic() - began > seconds:
            raise TooLong
        return
    late = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal late
        late = True
        raise TooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, min(seconds, AGAIN))
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also where the alarm came just before it was switched off
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if late:  # a bare `except` in the function has caught it
        raise TooLong


def load_functions(names: Sequence[str]) -> list[RewardFunction]:
    """Load the functions of `file.py:name`, each file once; all problems are reported together."""
    problems: list[Problem] = []
    modules: dict[str, ModuleType | None] = {}
    found: list[RewardFunction] = []
    for name in names:
        file, _, function = name.rpartition(":")
        if not file or not function:
            problems.append(Problem(f'"{name}" is not of the form file.py:function', KEY))
            continue
        if file not in modules:
            modules[file] = None
            try:
                modules[file] = _load(Path(file))
            except UserError as e:
                problems += e.problems
        module = modules[file]
        if module is None:
            continue
        made = getattr(module, function, None)
        if not callable(made):
            known = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
            problems.append(Problem(f"has no function {function}{nearest(function, known)}", KEY, file))
            continue
        found.append(made)
    if problems:
        raise UserError(*problems)
    return found


def _load(path: Path) -> ModuleType:
    """Load a file as a module, which may import other files of its folder."""
    if not path.is_file():
        raise UserError(Problem("there is no such file", KEY, str(path)))
    name = f"shardwise_rewards_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(Problem("is no Python file", KEY, str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its own module up there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        del sys.modules[name]
        where = f" (line {e.lineno})" if isinstance(e, SyntaxError) else _line_of(e, f"{path}:")
        raise UserError(Problem(f"cannot be imported: {type(e).__name__}: {e}{where}", KEY, str(path))) from None
    finally:
        sys.path.pop(0)
    return module
