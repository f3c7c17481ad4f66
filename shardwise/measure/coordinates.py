"""The coordinate check of a parametrization (Yang et al. 2022, appendix D.1): how much a few steps change the output of each part
of a model, at several widths. If learning rates transfer, the change is the same at every width: its slope over log width is
zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.data.open import open_data
from shardwise.run import Problem, Run, UserError, counted
from shardwise.run.config import ModelConfig
from shardwise.train.step import TrainState

PROBE = 1_000_000
"""Index of the first sample on which activations are compared; training does not get that far."""


@dataclass(frozen=True)
class Coordinates:
    """Root mean square change of each part's output, by width; the geometric mean over seeds."""

    widths: list[int]
    changes: dict[str, list[float]]

    @property
    def slopes(self) -> dict[str, float]:
        """Slopes of log change over log width."""
        x = np.log(self.widths)
        return {name: float(np.polyfit(x, np.log(values), 1)[0]) for name, values in self.changes.items()}


def of_width(run: Run, width: int) -> Run:
    """The run with another hidden size. Its other widths scale with it; the head size stays."""
    model = run.model
    share = width / model.hidden
    heads, kv = model.heads * share, model.kv_heads * share
    if model.attention != "latent" and (heads != int(heads) or heads < 1):
        reason = f"{width} is no multiple of the heads' size, {model.head_dim}: heads keep it at every width"
        raise UserError(Problem(reason, "--widths", "command line"))
    heads = max(1, round(heads))
    kv = max(1, round(kv))
    wide: ModelConfig = replace(
        model, hidden=width, heads=heads, kv_heads=kv if heads % kv == 0 else heads, ffn=max(1, round(model.ffn * share)),
        expert_ffn=round(model.expert_ffn * share), q_rank=round(model.q_rank * share), kv_rank=round(model.kv_rank * share),
        preset="",
    )  # fmt: skip
    return replace(run, model=wide)


def coordinates(
    run: Run, widths: Sequence[int], steps: int, seeds: int = 1, tell: Callable[[str], None] = lambda text: None
) -> Coordinates:
    """Train some steps at each width, on the run's data."""
    problems = []
    if run.layout.auto or run.layout.world > 1:
        problems.append(Problem("a coordinate check runs on one device: leave the layout out", "layout"))
    if run.objective.kind == "grpo":
        problems.append(Problem("grpo draws its own data as it trains; check another objective", "objective.kind"))
    if problems:
        raise UserError(*problems)
    changes: dict[str, list[float]] = {}
    for width in widths:
        sums: dict[str, float] = {}
        for seed in range(seeds):
            tell(f"width {width}, seed {seed}")
            wide = of_width(run, width)
            wide = replace(wide, train=replace(wide.train, seed=run.train.seed + seed))
            for name, value in _changes(wide, steps).items():
                if not math.isfinite(value):
                    reason = f"{run.train.lr:g} is too high: after {counted(steps, 'step')} a network of width {width} has diverged"
                    raise UserError(Problem(reason, "train.lr"))
                sums[name] = sums.get(name, 0.0) + math.log(max(value, 1e-30)) / seeds
        for name, total in sums.items():
            changes.setdefault(name, []).append(math.exp(total))
    return Coordinates(list(widths), changes)


def _changes(run: Run, steps: int) -> dict[str, float]:
    state, data = TrainState(run), open_data(run)
    size = run.train.global_batch
    probe = torch.as_tensor(data.train.take(np.arange(PROBE, PROBE + min(size, 8))).tokens, device=state.device)
    before = _outputs(state.model, probe)
    for step in range(steps):
        state.train_step(data.train.take(np.arange(step * size, (step + 1) * size)))
    state.refresh()
    after = _outputs(state.model, probe)
    return {name: float((after[name] - before[name]).pow(2).mean().sqrt()) for name in after}


@torch.no_grad()
def _outputs(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """The output of each part: the embedding, attention and feed-forward of each layer, the residual stream after it, the
    logits."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, given: Any, out: Any) -> None:
        found[name] = (out[0] if isinstance(out, tuple) else out).double()

    model.eval()
    with ExitStack() as hooks:
        for name, part in model.named_modules():
            if _is_part(name):
                hooks.callback(part.register_forward_hook(partial(keep, name)).remove)
        found["logits"] = model(tokens).result.double()
    return found


def _is_part(name: str) -> bool:
    words = name.split(".")
    return name == "embed" or (words[0] == "layers" and (len(words) == 2 or words[2:] in (["attention"], ["ffn"])))
