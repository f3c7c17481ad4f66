"""Cost by module adds up to the planner's by part, to the last operation, and activations to what the memory count finds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cases
import pytest

from shardwise.measure.counts.memory import measure_memory
from shardwise.measure.counts.modules import OPTIMIZER, module_activations, module_flops
from shardwise.measure.dry import dry_rank, even_routing
from shardwise.measure.verify import random_batch
from shardwise.plan.trainer.work import work
from shardwise.run import Run

Layout = dict[str, Any]
DRY: list[Any] = [
    ("dense", dict(tensor=2, async_tensor=True, recompute="attention")),
    ("tied", dict(pipeline=2, schedule="zb-v")),
    ("latent", dict(shard=2, recompute="operations", recompute_operations=("norm", "ffn"))),
    ("mixture", dict(shard=2, context=2, tensor=2, expert=2, expert_tensor=True, recompute="full")),
    ("dense", dict(recompute="attention")),
    ("tied", dict(recompute="operations", recompute_operations=("norm", "ffn"))),
    ("dense", dict(pipeline=2, schedule="zb-v")),
    ("dense", dict(tensor=2, async_tensor=True)),
    ("mixture", dict(shard=2, tensor=2, expert=2, expert_tensor=True)),
    ("mixture", dict(context=2, recompute="full")),
    ("latent", dict(shard=2)),
]


def part_of(name: str) -> str:
    """The planner's part of a module, by its name."""
    words = name.split(".")
    for word in ("router", "experts", "attention", "ffn", "shared", "head"):
        if word in words:
            return "ffn" if word == "shared" else word
    raise AssertionError(name)


def counted(run: Run, *count: Any) -> list[Any]:
    """What each of some functions counts of a step."""
    with dry_rank(run, run.layout.world - 1) as train_state, even_routing(train_state):
        return [each(train_state, random_batch(run)) for each in count]


@pytest.mark.parametrize(("model", "layout"), DRY, ids=str)
@pytest.mark.drawn(group="dry ranks")
def test_modules_add_up_to_the_plan(model: str, layout: Layout) -> None:
    data = layout.get("shard", 1)
    stages = layout.get("pipeline", 1)
    run = cases.make_run(model, layout, 2 * stages, global_batch=(2 if stages > 1 else 1) * data, microbatch=1)
    flops, activations, memory = counted(run, module_flops, module_activations, measure_memory)
    by_part: Counter[tuple[str, str]] = Counter()
    for name, passes in flops.items():
        for which, value in passes.items():
            by_part[part_of(name), which] += value  # type: ignore[assignment]
    planned = work(run, run.layout.world - 1)
    expected = {(part, which): v for part, passes in planned.flops.items() for which, v in passes.items() if v}
    assert dict(by_part) == expected
    assert sum(by_part.values()) == planned.total
    assert sum(activations.values()) == sum(each[0] for each in memory["saved"].values())
    assert any(name.endswith("attention.core") for name in flops)


def test_muon_is_a_phase_beside_the_modules() -> None:
    run = cases.make_run("mixture", dict(shard=2), layers=2, global_batch=2, microbatch=1, optimizer="muon")
    (flops,) = counted(run, module_flops)
    planned = work(run, 1)
    assert flops[OPTIMIZER] == planned.flops["parameters"]
    assert flops[OPTIMIZER]["optimizer"] > 0
    assert sum(sum(passes.values()) for passes in flops.values()) == planned.total


@pytest.mark.drawn(group="profiles")
def test_layers_alike_cost_alike() -> None:
    run = cases.make_run("dense", dict(recompute="full"), 2, global_batch=2, microbatch=1)
    flops, activations = counted(run, module_flops, module_activations)
    for module in ("attention.q", "attention.core", "ffn.up"):
        assert len({str(flops[f"layers.{layer}.{module}"]) for layer in range(2)}) == 1
    # Only its input is kept of a repeated block: the block before made it.
    assert not any(name.startswith("layers.0.") for name in activations)
