"""Asynchronous pipelines in one process, as the papers state them: stages one behind the other, each with all weights that it has
had, AdamW on each, and a microbatch that uses of each stage the version that the stage would have used."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import torch

from shardwise.model.loss import LinearCrossEntropy
from shardwise.model.transformer import make_stage
from shardwise.parallel.objective import Microbatch
from shardwise.plan.cost.stages import layers_of_stages
from shardwise.run import Run
from shardwise.train.optimizers.schedule import learning_rate_factor
from shardwise.train.step import TrainState


def trained(run: Run, one: Run, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of the steps and the weights after them. `one` is the run in one process, which draws the initial weights and cuts
    batches into microbatches."""
    state = TrainState(one)
    whole = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    ranges, count = layers_of_stages(run), run.layout.pipeline
    stages = [make_stage(run.model, torch.float64, ranges[s], s == 0, s == count - 1) for s in range(count)]
    history: list[list[dict[str, torch.Tensor]]] = []  # of each stage, its weights after so many updates
    decayed = _decayed(state)
    for s, stage in enumerate(stages):
        stage.to_empty(device="cpu")
        stage.loss = LinearCrossEntropy()
        stages[s] = stage.double()
        history.append([{name: whole[name].clone() for name, _ in stage.named_parameters()}])
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    losses = []
    m = run.accumulation
    for t in range(steps):
        batch = cases.batch(t, True, run.train.global_batch)
        state.objective.begin()
        tokens, total = float(state.objective.count(batch)), 0.0
        sums: list[dict[str, torch.Tensor]] = [{} for _ in stages]
        for n, each in enumerate(state.microbatches(batch)):
            number = t * m + n % m  # each data rank has m of them, one rank's behind the other's
            used = [history[s][_version(run, s, number, m)] for s in range(count)]
            loss = _loss(stages, used, each, state)
            total += loss.item()
            (loss / tokens).backward()
            for s, stage in enumerate(stages):
                for name, p in stage.named_parameters():
                    assert p.grad is not None
                    sums[s][name] = sums[s].get(name, torch.zeros_like(p)) + p.grad
                    p.grad = None
        losses.append(total / tokens)
        rate = run.train.lr * learning_rate_factor(run.train, t + 1)
        for s in range(count):
            latest = history[s][-1]
            history[s].append({n: _adamw(run, n, latest[n], sums[s][n], moments, rate, t + 1, decayed) for n in latest})
    return losses, {name: x.numpy() for s in range(count) for name, x in history[s][-1].items()}


def _version(run: Run, stage: int, number: int, m: int) -> int:
    """How many updates the stage has had where this microbatch goes through it, or with 2BW the step before had."""
    if run.layout.schedule == "pipedream-2bw":
        return max(0, number // m - 1)
    if run.layout.schedule != "pipedream":  # synchronous
        return number // m
    finished = max(0, number - (run.layout.pipeline - 1 - stage))  # microbatches that have gone back through it
    return finished // m


def _loss(stages: list[Any], used: list[dict[str, torch.Tensor]], batch: Microbatch, state: TrainState) -> torch.Tensor:
    x: Any = batch["tokens"]
    for stage, weights in zip(stages, used, strict=True):
        for name, p in stage.named_parameters():
            p.data = weights[name]
        last = stage is stages[-1]
        finish = (lambda hidden, matrix: state.objective.loss(batch, stages[-1].loss, hidden, matrix)) if last else None
        x, _ = stage(x, positions=batch["positions"], documents=batch.get("documents"), finish=finish)
    return x


def _decayed(state: TrainState) -> dict[str, float]:
    """The weight decay of each parameter, as the optimizer has it."""
    found = {}
    for part in state.optimizer.parts:
        for group in part.param_groups:
            for p in group["params"]:
                at = next(n for n, shard in enumerate(state.optimizer.shards) if shard is p)
                found[state.parallel.parameters[at].name] = group["weight_decay"]
    return found


def _adamw(
    run: Run, name: str, p: torch.Tensor, grad: torch.Tensor, moments: dict[str, Any], rate: float, step: int,
    decayed: dict[str, float],
) -> torch.Tensor:  # fmt: skip
    """One step of AdamW (Loshchilov and Hutter 2019), written out."""
    train = run.train
    first, second = moments.get(name, (torch.zeros_like(p), torch.zeros_like(p)))
    first = train.beta1 * first + (1 - train.beta1) * grad
    second = train.beta2 * second + (1 - train.beta2) * grad**2
    moments[name] = first, second
    change = (first / (1 - train.beta1**step)) / ((second / (1 - train.beta2**step)).sqrt() + train.eps)
    return (p * (1 - rate * decayed[name]) - rate * change).detach()
