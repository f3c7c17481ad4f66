"""Finds the fastest cuBLASLt algorithms for a run's GEMMs, during the run itself.

PyTorch takes the first algorithm that cuBLASLt proposes, which is chosen for a chip at its full clock. A chip that trains all day
reaches its power limit and lowers its clock. Then the algorithm that draws less power wins, and timing a GEMM alone for a few
milliseconds does not show it. So for a few hundred ordinary training steps, each step draws random algorithms for all large GEMMs,
and the step times show which combination is best (`model/gemm/experiment.py`). Some more steps, with that combination or with
PyTorch's algorithms, confirm it. All algorithms give bitwise the same result. The choice is stored for the next run on the same
kind of machine.
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
from shardwise.train.step_state import StepState

STEPS = 256
"""Steps with randomly drawn algorithms. If step times vary by 0.6%, as seen on an H200, this measures an effect to about 0.2%."""
COMPARED = 64
"""Further steps, with either the best combination or PyTorch's algorithms: the best of many is in part the luckiest."""
SHAPES = 32
"""Maximum number of GEMM shapes that are tuned; a network has about twenty."""


def attach(train_state: StepState, log: Callable[[str], None] = lambda _: None) -> None:
    """Tune the GEMMs of a train state, if its run asks for it."""
    gpu = train_state.device.type == "cuda"
    if tunes_gemms(train_state.run, gpu=gpu) and library() is not None:
        train_state.tuner = Tuner(choices(train_state.device.index), log)


class Tuner:
    """Called before every step: finds candidates after the first step, draws among them, compares, and decides."""

    def __init__(self, known: Choices, log: Callable[[str], None]) -> None:
        self.choices, self.log = known, log
        self.options: dict[Shape, list[Algorithm | None]] = {}
        self.experiment: Experiment | None = None
        self.best: tuple[int, ...] | None = None  # set once the comparison begins
        self.starts: list[torch.cuda.Event] = []
        self.steps = 0
        self.done = False

    def __call__(self) -> None:
        """Called just before a step begins."""
        self.steps += 1
        if self.done or self.steps == 1:
            return
        if self.experiment is None:
            self._begin()
            return
        self.starts.append(torch.cuda.Event(enable_timing=True))
        self.starts[-1].record()
        if len(self.starts) > (STEPS if self.best is None else COMPARED):
            self._evaluate()
        if not self.done:
            drawn = self.experiment.draw()
            self._use(drawn if self.best is None else self.best if drawn[0] else self._defaults)

    def stop(self) -> None:
        """Use PyTorch's algorithms if nothing is decided yet: a captured CUDA graph cannot change."""
        if not self.done:
            self._use(self._defaults)
            self.done = True

    @property
    def _defaults(self) -> tuple[int, ...]:
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
            self.log(f"the next {STEPS + COMPARED} steps also find the fastest algorithms for {count} GEMMs")

    def _evaluate(self) -> None:
        """Decide from the step times so far: which combination to compare, or which algorithms to keep."""
        assert self.experiment is not None
        self.starts[-1].synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(self.starts)]
        outcome = self.experiment.outcome(times)
        if self.best is None and any(outcome.options):
            self.best, self.experiment, self.starts = outcome.options, Experiment([2]), self.starts[-1:]
        else:
            self._take(
                self.best if self.best is not None and any(outcome.options) else self._defaults, outcome.saves, times
            )

    def _take(self, options: tuple[int, ...], saves: float, times: list[float]) -> None:
        self._use(options)
        self.done = True
        pairs = zip(self.options.items(), options, strict=True)
        found = {shape: algorithms[option] for (shape, algorithms), option in pairs}
        self.choices.keep(found)
        others = sum(algorithm is not None for algorithm in found.values())
        self.log(
            f"{others} of {len(found)} GEMMs run by other algorithms than PyTorch proposes, which saves "
            f"{saves / (statistics.median(times) + saves / 2):.1%} of a step; kept in {self.choices.path}"
            if others
            else f"PyTorch's algorithms for {len(found)} GEMMs are the fastest; kept in {self.choices.path}"
        )
