"""The best model for a budget of compute, device-hours or money on a chip.

A scaling law gives the best size for an amount of compute; the compute of a device-hour depends on the size and its layout, which
the planner finds. So a few sizes around the law's optimum are planned, each gets the tokens that its throughput allows, and the
lowest loss wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.hardware.chips import Chip, find_chip
from shardwise.plan.cost.flops import parameters
from shardwise.plan.plan import Plan
from shardwise.plan.search import search
from shardwise.run import Problem, UserError, run_from_dict
from shardwise.scale.optimum import SERVED, Loss, Optimum, best_size
from shardwise.scale.points import FLOPS_PER_TOKEN
from shardwise.scale.published import step_law
from shardwise.scale.shapes import shape_of

USUAL_MFU = 0.4
"""The MFU that the search starts with; the plan's own MFU then replaces it."""
TOO_SMALL = "the budget is too small to train any model and serve it"
SPREAD = (0.5, 0.71, 1.0, 1.41, 2.0)
"""The sizes to plan, as multiples of the law's best."""


@dataclass(frozen=True)
class Wanted:
    """A budget: exactly one of `flops` and `hours`, the device-hours of all devices."""

    chip: str
    flops: float = 0.0
    hours: float = 0.0
    devices: int = 0
    """0: as many as finish in `days`."""
    days: float = 30.0
    seq_len: int = 4096
    vocab: int = 128256
    served: float = 0.0
    """Tokens that the model will read and write over its lifetime."""
    price: float = 0.0


@dataclass(frozen=True)
class Choice:
    """A model with its plan."""

    params: int
    tokens: float
    loss: float
    lr: float
    plan: Plan
    serving_flops: float

    @property
    def flops(self) -> float:
        """FLOPs of training, 6 N D."""
        return FLOPS_PER_TOKEN * self.params * self.tokens


@dataclass(frozen=True)
class Budget:
    """The best choice, all planned choices, and the optimum by the law alone."""

    best: Choice
    choices: list[Choice]
    by_law: Optimum
    devices: int


def find_budget(wanted: Wanted, loss: Loss, tell: Callable[[str], None] = lambda text: None) -> Budget:
    """Plans sizes around the law's best, and takes the one with the lowest loss."""
    chip = find_chip(wanted.chip)
    peak = chip.peak.get(_dtype(chip)) or max(chip.peak.values())
    hours = wanted.hours or wanted.flops / (peak * USUAL_MFU * 3600)
    flops = wanted.flops or hours * 3600 * peak * USUAL_MFU
    devices = wanted.devices or _devices(hours, wanted.days, chip.devices_per_node)
    if devices > chip.devices_per_node and devices % chip.devices_per_node:
        what = f"{devices} devices are not whole machines of {chip.devices_per_node}"
        raise UserError(Problem(what, "--devices", "command line"))
    by_law = best_size(loss, flops, wanted.served)
    if by_law.tokens < 1:
        raise UserError(TOO_SMALL)
    choices: list[Choice] = []
    problems: list[str] = []
    for factor in SPREAD:
        shape = shape_of(by_law.params * factor, wanted.vocab)
        tell(f"planning {by_law.params * factor / 1e9:.3g} billion parameters on {devices} {wanted.chip}")
        try:
            choice = _choice(wanted, shape, by_law.tokens / factor, devices, chip, loss, hours)
        except UserError as e:
            problems.append(str(e))
            continue
        if choice is not None and all(choice.params != other.params for other in choices):
            choices.append(choice)
    if not choices:
        raise UserError(*(problems[:3] or [TOO_SMALL]))
    best = min(choices, key=lambda choice: choice.loss)
    return Budget(best, choices, by_law, devices)


def _choice(
    wanted: Wanted, shape: dict[str, Any], guess: float, devices: int, chip: Chip, loss: Loss, hours: float
) -> Choice | None:
    """Plans one size on the devices; twice, because the batch, and so the throughput, depends on the tokens that it allows."""
    tokens = guess
    for _ in range(2):
        plan = _plan(wanted, shape, tokens, devices, chip)
        size = parameters(plan.run.model).total
        used = SERVED * size * wanted.served
        if wanted.flops:
            tokens = (wanted.flops - used) / (FLOPS_PER_TOKEN * size)
        else:
            # Serving is charged at the throughput of training.
            rate = plan.cost.device_hours / (plan.run.train.steps * plan.run.batch_tokens)
            tokens = hours / rate - used / (FLOPS_PER_TOKEN * size)
        if tokens < 1e3:
            return None
    plan = _plan(wanted, shape, tokens, devices, chip)
    embedded = parameters(plan.run.model)
    lr, _ = step_law(float(embedded.total - embedded.embedding - embedded.head), tokens)
    reached = float(loss(np.array([float(size)]), np.array([tokens]))[0])
    return Choice(size, tokens, reached, lr, plan, used)


def _plan(wanted: Wanted, shape: dict[str, Any], tokens: float, devices: int, chip: Chip) -> Plan:
    _, batch = step_law(1.0, tokens)
    sequences = 2 ** max(0, round(math.log2(max(1.0, batch / wanted.seq_len))))
    sequences = max(sequences, devices) if devices & (devices - 1) == 0 else sequences
    steps = max(1, round(tokens / (sequences * wanted.seq_len)))
    per_node = chip.devices_per_node
    nodes = max(1, devices // per_node)
    cluster = dict(chip=wanted.chip, nodes=nodes, devices_per_node=min(devices, per_node), price=wanted.price)
    train = dict(steps=steps, global_batch=sequences, seq_len=wanted.seq_len, dtype=_dtype(chip))
    run = run_from_dict(dict(name="budget", model=shape, layout="auto", train=train, cluster=cluster))
    return search(run, keep=1).best


def _dtype(chip: Chip) -> str:
    """The dtype to train in: older chips do not compute in bfloat16."""
    return "bfloat16" if "bfloat16" in chip.peak else "float16"


def _devices(hours: float, days: float, per_node: int) -> int:
    """The fewest devices that finish in `days` days: fractions of a machine, then machines in powers of two."""
    need = hours / (24 * days)
    count = 1
    while count < need and count < 2**20:
        count *= 2
    return count if count <= per_node else per_node * 2 ** math.ceil(math.log2(need / per_node))


def written(choice: Choice) -> Plan:
    """The plan whose run has the law's learning rate, to be written to a file."""
    run = choice.plan.run
    return replace(choice.plan, run=replace(run, train=replace(run.train, lr=choice.lr)))
