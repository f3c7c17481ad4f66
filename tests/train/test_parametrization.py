"""muP: the factors of its table, the standard parametrization at the base width, the same numbers on every layout, and coordinates
that do not depend on the width."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from observed import assert_same, one_process
from parallel_pool import RankPool

from shardwise.run import run_from_dict
from shardwise.run.parameters import find_parameter
from shardwise.run.parametrization import initial_factor, rate_factor
from shardwise.train.step import TrainState

MUP = dict(parametrization="mup", base_width=16, base_layers=1)


@pytest.mark.parametrize(
    ("name", "keys", "optimizer", "initial", "rate"),
    [
        ("embed.weight", {}, "adamw", 1, 1),
        ("layers.0.attention_norm.weight", {}, "adamw", 1, 1),
        ("layers.0.attention.q.weight", {}, "adamw", 1 / 2, 1 / 4),
        ("layers.0.ffn.down.weight", {}, "adamw", 1 / 2, 1 / 4),
        ("layers.0.attention.q.weight", {}, "muon", 1 / 2, 1),
        ("head.weight", {}, "adamw", 0, 1 / 4),
        ("head.weight", {}, "muon", 0, 1 / 4),
        ("norm.weight", {}, "adamw", 1, 1),
        ("norm.weight", dict(tied_embeddings=True), "adamw", 1 / 4, 1 / 4),
        ("layers.0.ffn.router.weight", dict(experts=4, experts_per_token=2), "adamw", 1 / 4, 1 / 4),
        ("layers.0.ffn.router.weight", dict(experts=4, experts_per_token=2), "muon", 1 / 4, 1 / 2),
        ("layers.0.ffn.experts.up", dict(experts=4, experts_per_token=2), "adamw", 1 / 2, 1 / 4),
    ],
)
def test_the_factors_of_the_table(name: str, keys: dict[str, Any], optimizer: str, initial: float, rate: float) -> None:
    """Yang et al. 2022, table 3, at four times the base width."""
    train = dict(parametrization="mup", base_width=16, optimizer=optimizer)
    run = run_from_dict(dict(model=dict(layers=2, hidden=64, heads=4, vocab=32, **keys), train=train))
    entry = find_parameter(run.model, name)
    assert initial_factor(entry, run.model, run.train) == pytest.approx(initial)
    assert rate_factor(entry, run.model, run.train) == pytest.approx(rate)
    standard = run_from_dict(dict(model=dict(layers=2, hidden=64, heads=4, vocab=32, **keys))).train
    assert initial_factor(entry, run.model, standard) == rate_factor(entry, run.model, standard) == 1


def test_depth_slows_layers_by_its_root_and_what_they_add_by_itself() -> None:
    run = run_from_dict(dict(model=dict(layers=4, hidden=64, heads=4, vocab=32), train=MUP | dict(base_width=64)))
    rates = {
        name: rate_factor(find_parameter(run.model, name), run.model, run.train)
        for name in ("layers.0.attention.q.weight", "layers.0.attention.out.weight", "embed.weight")
    }
    assert list(rates.values()) == pytest.approx([1 / 2, 1 / 4, 1])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_at_the_base_width_it_is_the_standard_parametrization(optimizer: str) -> None:
    settings = dict(layers=2, optimizer=optimizer)
    want = one_process("tied", **settings)
    got = one_process("tied", **settings, parametrization="mup", base_width=cases.model_of("tied")["hidden"])
    assert got["losses"] == want["losses"]
    other = one_process("tied", **settings, parametrization="mup", base_width=8)
    assert other["losses"] != want["losses"]


def test_groups_have_the_rate_and_keep_rate_times_decay() -> None:
    run = cases.make_run("dense", {}, layers=2, weight_decay=0.1, **MUP)
    groups = TrainState(run).optimizer.parts[0].param_groups
    assert len({group["rate"] for group in groups}) > 2
    for group in groups:
        assert group["weight_decay"] * group["rate"] == pytest.approx(0.1 if group["weight_decay"] else 0.0)


LARGE = pytest.mark.large(
    "every other axis and family; that factors follow the table and not the cut is known from one"
)


@pytest.mark.parametrize(
    ("model", "layout", "optimizer"),
    [
        ("mixture", dict(shard=2, tensor=2), "muon"),
        *(
            pytest.param(model, layout, optimizer, marks=LARGE)
            for optimizer in ("adamw", "muon")
            for model, layout in (
                ("tied", dict(pipeline=2, replicate=2)),
                ("latent", dict(tensor=2, shard=2)),
                ("mixture", dict(shard=2, expert=2, context=2)),
                ("parallel", dict(context=2, tensor=2)),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.drawn(group="whole runs")
def test_every_layout_computes_the_same(ranks: RankPool, model: str, layout: dict[str, Any], optimizer: str) -> None:
    settings = cases.layers_for(layout) | dict(optimizer=optimizer) | MUP
    want = one_process(model, microbatch=1, **settings)
    run = cases.make_run(model, layout, **settings)
    for got in ranks.run(run.layout.world, cases.train, run, True):
        assert_same(got, want, f"{model} {layout}")
