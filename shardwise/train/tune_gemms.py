"""Finds the fastest algorithms for a run's matrix products, by the run itself.

PyTorch multiplies with cuBLASLt and takes the first of the algorithms that it proposes, which is chosen for a chip at its full
clock. A chip that multiplies large matrices all day draws all the power it may have and slows down until that is enough. A step
is then as fast as it is thrifty, and no product that is timed alone for some milliseconds shows that. So for some hundred steps of
training, which count like any others, the algorithms of all large products are drawn anew for each step, and the times of these
steps tell which are best together (`products/experiment.py`); some more, made with those or without, tell whether that is true. All
give the same numbers to the last bit. What was found is kept for the next run on such a machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch

from shardwise.model.gemm.candidates import Candidates
from shardwise.model.gemm.cublaslt import Algorithm, LibraryError, Shape, library
from shardwise.model.gemm.experiment import Experiment
from shardwise.model.gemm.tuned import Choices, choices
from shardwise.run.derive import tunes_gemms
from shardwise.train.step import TrainState

STEPS = 256
"""Steps in which algorithms are drawn. Where steps vary by 0.6%, as seen on an H200, an effect is then known to some 0.2%."""
COMPARED = 64
"""Steps after those, made by what seemed best or by PyTorch's algorithms: the best of many is in part the luckiest."""
SHAPES = 32
"""Shapes that are looked at; a network has some twenty."""


def attach(train_state: TrainState, log: Callable[[str], None] = lambda _: None) -> None:
    """Let a trainee find out, if its run is to."""
    gpu = train_state.device.type == "cuda"
    if tunes_gemms(train_state.run, gpu=gpu) and library() is not None:
        train_state.tuner = Tuner(choices(train_state.device.index), log)


class Tuner:
    """Called before every step: looks for candidates after the first, draws among them, compares, and decides."""

    def __init__(self, known: Choices, log: Callable[[str], None]) -> None:
        self.choices, self.log = known, log
        self.options: dict[Shape, list[Algorithm | None]] = {}
        self.experiment: Experiment | None = None
        self.best: tuple[int, ...] | None = None  # once it is to be compared
        self.starts: list[torch.cuda.Event] = []
        self.steps = 0
        self.done = False

    def __call__(self) -> None:
        """A step is about to begin."""
        self.steps += 1
        if self.done or self.steps == 1:
            return
        if self.experiment is None:
            self._begin()
            return
        self.starts.append(torch.cuda.Event(enable_timing=True))
        self.starts[-1].record()
        if len(self.starts) > (STEPS if self.best is None else COMPARED):
            self._look()
        if not self.done:
            drawn = self.experiment.draw()
            self._use(drawn if self.best is None else self.best if drawn[0] else self._usual)

    def stop(self) -> None:
        """Leave what is not known to PyTorch, as where steps are recorded and can't change any more."""
        if not self.done:
            self._use(self._usual)
            self.done = True

    @property
    def _usual(self) -> tuple[int, ...]:
        return (0,) * len(self.options)

    def _use(self, drawn: tuple[int, ...]) -> None:
        for (shape, algorithms), option in zip(self.options.items(), drawn, strict=True):
            self.choices.use(shape, algorithms[option])

    def _begin(self) -> None:
        shapes = list(self.choices.unknown)
        for shape in shapes if len(shapes) <= SHAPES else []:
            try:
                found = Candidates(shape, self.choices.device).found()
            except (LibraryError, torch.cuda.OutOfMemoryError):
                continue
            if found:
                self.options[shape] = [None, *found]
        self.experiment = Experiment([len(algorithms) for algorithms in self.options.values()])
        self.done = not self.options
        if self.options:
            count = len(self.options)
            self.log(f"the next {STEPS + COMPARED} steps also find the fastest algorithms for {count} matrix products")

    def _look(self) -> None:
        """What the steps so far say: what to compare, or what to take."""
        assert self.experiment is not None
        self.starts[-1].synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(self.starts)]
        outcome = self.experiment.outcome(times)
        if self.best is None and any(outcome.options):
            self.best, self.experiment, self.starts = outcome.options, Experiment([2]), self.starts[-1:]
        else:
            self._take(
                self.best if self.best is not None and any(outcome.options) else self._usual, outcome.saves, times
            )

    def _take(self, options: tuple[int, ...], saves: float, times: list[float]) -> None:
        self._use(options)
        self.done = True
        pairs = zip(self.options.items(), options, strict=True)
        found = {shape: algorithms[option] for (shape, algorithms), option in pairs}
        self.choices.keep(found)
        others = sum(algorithm is not None for algorithm in found.values())
        self.log(
            f"{others} of {len(found)} matrix products are made by other algorithms than PyTorch proposes, which saves "
            f"{saves / (statistics.median(times) + saves / 2):.1%} of a step; kept in {self.choices.path}"
            if others
            else f"PyTorch's algorithms for {len(found)} matrix products are the fastest; kept in {self.choices.path}"
        )
