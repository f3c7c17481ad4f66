"""A ladder: small runs of the same kind as a large target run, from which its loss is predicted before it is paid for.

Every rung has the target's tokens per parameter, so that one power law fits all of them, and the target's proportions. Batch and
learning rate are scaled from the target's by the Step law (Li et al. 2025); with muP every rung has the target's learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.plan.cost.flops import parameters
from shardwise.run import Problem, Run, UserError
from shardwise.run.config import ModelConfig
from shardwise.scale.points import FLOPS_PER_TOKEN
from shardwise.scale.published import step_law

SPACING = 1.5
"""Ratio of the sizes of two neighbouring rungs."""
LARGEST = 3.0
"""The target is at least this many times larger than any rung."""
FEWEST_STEPS = 50
SHALLOW = 8
"""Models with fewer layers keep them all where they have enough widths: one layer of so few is too large a step for losses to lie
on a smooth curve."""


@dataclass(frozen=True)
class Rung:
    """One run of the ladder."""

    run: Run
    params: int
    tokens: int

    @property
    def flops(self) -> float:
        """FLOPs of training, 6 N D."""
        return FLOPS_PER_TOKEN * self.params * self.tokens


def rung_of(run: Run) -> Rung:
    """A run as a rung."""
    return Rung(run, parameters(run.model).total, run.train.steps * run.batch_tokens)


def make_ladder(target: Run, flops: float, rungs: int = 5) -> list[Rung]:
    """Runs that together take at most `flops` FLOPs, the smallest first."""
    goal = rung_of(target)
    ratio = goal.tokens / goal.params
    shares = [SPACING ** (-2 * at) for at in range(rungs)]
    largest = min(goal.params / LARGEST, math.sqrt(flops / (FLOPS_PER_TOKEN * ratio * sum(shares))))
    wanted = [largest / SPACING**at for at in reversed(range(rungs))]
    found = _rungs(target, goal, wanted, ratio, all_layers=True) if target.model.layers < SHALLOW else []
    if len(found) < rungs:
        found = _rungs(target, goal, wanted, ratio, all_layers=False)
    if not found:
        reason = f"no model of this kind has a third of its parameters, {round(goal.params / LARGEST):,}"
        raise UserError(Problem(f"{reason}: its vocabulary or its heads are too large for a ladder", "model"))
    if len(found) < rungs:
        reason = f"only {len(found)} sizes of this model are small enough for the budget, and {rungs} are wanted"
        raise UserError(
            Problem(f"{reason}: give more, or a model with smaller heads or vocabulary", "--budget", "command line")
        )
    return found


def _rungs(target: Run, goal: Rung, wanted: list[float], ratio: float, *, all_layers: bool) -> list[Rung]:
    """Rungs of about the wanted sizes, the smallest first, each size once."""
    found: list[Rung] = []
    for size in wanted:
        model = _smaller(target.model, size, goal.params / LARGEST, all_layers)
        if model is not None and (not found or parameters(model).total > found[-1].params):
            found.append(_rung(target, goal, model, ratio))
    return found


def _rung(target: Run, goal: Rung, model: ModelConfig, ratio: float) -> Rung:
    size = parameters(model).total
    tokens = ratio * size
    (_, batch), (_, full) = step_law(1.0, tokens), step_law(1.0, float(goal.tokens))
    data_ranks = max(1, target.layout.data_ranks)
    sequences = max(1, round(target.train.global_batch * batch / full / data_ranks)) * data_ranks
    steps = max(FEWEST_STEPS, round(tokens / (sequences * target.train.seq_len)))
    rate = 1.0
    if target.train.parametrization != "mup":
        rate = step_law(float(size), tokens)[0] / step_law(float(goal.params), float(goal.tokens))[0]
    shrunk = steps / target.train.steps
    train = replace(
        target.train, steps=steps, global_batch=sequences, microbatch=0, lr=target.train.lr * rate,
        warmup=round(target.train.warmup * shrunk),
        eval_every=steps, checkpoint_every=0,
    )  # fmt: skip
    name = f"ladder-{size // 1000}k" if size < 10_000_000 else f"ladder-{size // 1_000_000}m"
    return rung_of(replace(target, name=name, model=model, train=train))


def _smaller(model: ModelConfig, wanted: float, most: float, all_layers: bool) -> ModelConfig | None:
    """The model shrunk to about `wanted` parameters, never more than `most`: hidden size, heads and widths shrink together; heads
    keep their size. The depth shrinks at half the rate, or not at all. None where every such model is larger."""
    best: tuple[float, ModelConfig] | None = None
    group = model.heads // model.kv_heads
    for heads in range(1, model.heads + 1):
        share = heads / model.heads
        usual = model.layers * math.sqrt(share)
        for layers in range(model.layers if all_layers else 1, model.layers + 1):
            small = replace(
                model, layers=layers, hidden=model.hidden * heads // model.heads, heads=heads,
                kv_heads=max(1, heads // group) if heads % max(1, heads // group) == 0 else heads,
                ffn=max(8, round(model.ffn * share / 8) * 8), expert_ffn=round(model.expert_ffn * share / 8) * 8,
                dense_layers=min(model.dense_layers, layers), preset="",
            )  # fmt: skip
            size = parameters(small).total
            off = abs(math.log(size / wanted)) + 0.25 * abs(math.log(layers / usual))
            if size <= most and (best is None or off < best[0]):
                best = off, small
    return None if best is None else best[1]
