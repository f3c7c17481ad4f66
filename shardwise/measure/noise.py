"""The critical batch from the noise of gradients (McCandlish et al. 2018, appendix A.1).

The expected squared norm of a gradient over B sequences is |G|^2 + S / B: the squared norm of the true gradient, plus the variance
of one sequence's gradient over B. Two batch sizes determine both. The ratio S / |G|^2 is the batch beyond which more sequences a
step save few steps; it grows as the model learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardwise.data.open import open_data
from shardwise.run import Problem, Run, UserError
from shardwise.train.step import TrainState


@dataclass(frozen=True)
class Noise:
    """The measurement after `step` steps; the critical batch is in tokens."""

    step: int
    loss: float
    critical_batch: float
    signal: float
    """|G|^2."""
    variance: float
    """S, the variance of one sequence's gradient."""


def measure_noise(run: Run, steps: int, draws: int = 16, tell: Callable[[str], None] = lambda text: None) -> Noise:
    """Train some steps, then compute gradients at two batch sizes without updating."""
    small, big = 1, run.train.global_batch
    problems = []
    if run.layout.auto or run.layout.world > 1:
        problems.append(Problem("the noise is measured on one device: leave the layout out", "layout"))
    if run.objective.kind == "grpo":
        problems.append(
            Problem("grpo draws its own data as it trains; measure the noise of another objective", "objective.kind")
        )
    if big < 2 * small:
        problems.append(Problem(f"{big} is too few sequences to compare with {small}", "train.global_batch"))
    if problems:
        raise UserError(*problems)
    data = open_data(run)
    state = TrainState(run)
    loss = float("nan")
    for step in range(steps):
        tell(f"step {step} of {steps}")
        loss = float(state.train_step(data.train.take(np.arange(step * big, (step + 1) * big))).loss)
    other = TrainState(replace(run, train=replace(run.train, global_batch=small, microbatch=small)))
    with torch.no_grad():
        for mine, theirs in zip(other.parallel.parameters, state.parallel.parameters, strict=True):
            mine.parameter.copy_(theirs.parameter)
    squares: dict[int, list[float]] = {big: [], small: []}
    start = steps * big
    for draw in range(draws):
        tell(f"gradient {draw} of {draws}")
        for at, size, count in ((state, big, 1), (other, small, max(1, big // small // 2))):
            for _ in range(count):
                batch = data.train.take(np.arange(start, start + size))
                # The update is refused after the norm is known, so nothing changes.
                norm = at.train_step(batch, accept=lambda loss, norm: False).grad_norm
                squares[size].append(float(norm) ** 2)
                start += size
    few, many = np.mean(squares[small]), np.mean(squares[big])
    signal = float((big * many - small * few) / (big - small))
    variance = float((few - many) / (1 / small - 1 / big))
    batch_tokens = variance / signal * run.train.seq_len if signal > 0 else float("inf")
    return Noise(steps, loss, batch_tokens, signal, variance)
