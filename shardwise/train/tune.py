"""Finds the fastest algorithms for a run's matrix products, by the run itself.

PyTorch multiplies with cuBLASLt and takes the first of the algorithms that it proposes, which is chosen for a chip at its full
clock. A chip that multiplies large matrices all day draws all the power it may have and slows down until that is enough. A step
is then as fast as it is thrifty, and no product that is timed alone for some milliseconds shows that. So for some hundred steps of
training, which count like any others, the algorithms of all large products are drawn anew for each step, and the times of these
steps tell which are best together (`products/experiment.py`). All give the same numbers to the last bit. What was found is kept for
the next run on such a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from shardwise.model.products.candidates import Candidates
from shardwise.model.products.chosen import Choices, choices
from shardwise.model.products.cublaslt import Algorithm, LibraryError, Shape, library
from shardwise.model.products.experiment import Experiment
from shardwise.run.derive import tunes_products
from shardwise.train.step import Trainee

STEPS = 256
"""Steps in which algorithms are drawn. Where steps vary by half a percent, an effect is then known to about a thousandth."""
SHAPES = 32
"""Shapes that are looked at; a network has some fifteen."""


def attach(trainee: Trainee, say: Callable[[str], None] = lambda _: None) -> None:
    """Let a trainee find out, if its run is to."""
    gpu = trainee.device.type == "cuda"
    if tunes_products(trainee.run, gpu=gpu) and library() is not None:
        trainee.tuner = Tuner(choices(trainee.device.index), say)


class Tuner:
    """Called before every step: looks for candidates after the first, draws among them, and decides."""

    def __init__(self, known: Choices, say: Callable[[str], None]) -> None:
        self.choices, self.say = known, say
        self.options: dict[Shape, list[Algorithm | None]] = {}
        self.experiment: Experiment | None = None
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
        if len(self.starts) > STEPS:
            self._end()
        else:
            self._use(self.experiment.draw())

    def stop(self) -> None:
        """Leave what is not known to PyTorch, as where steps are recorded and can't change any more."""
        if not self.done:
            self._use((0,) * len(self.options))
            self.done = True

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
            self.options[shape] = [None, *found]
        self.experiment = Experiment([len(algorithms) for algorithms in self.options.values()])
        self.done = not self.options
        if self.options:
            self.say(f"the next {STEPS} steps also find the fastest algorithms for {len(self.options)} matrix products")

    def _end(self) -> None:
        assert self.experiment is not None
        self.starts[-1].synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(self.starts)]
        outcome = self.experiment.outcome(times)
        self._use(outcome.options)
        self.done = True
        found = [
            (shape.name, algorithms[option])
            for (shape, algorithms), option in zip(self.options.items(), outcome.options, strict=True)
        ]
        self.choices.keep(dict(found))
        better = sum(algorithm is not None for _, algorithm in found)
        share = outcome.saves / sorted(times)[len(times) // 2]
        self.say(
            f"{better} of {len(found)} matrix products are made by other algorithms than PyTorch's from here on, which should save "
            f"{share:.1%} of a step; kept in {self.choices.path}"
        )
