"""Adapters on every layout: the frozen weights stay, the adapters are trained as by one process, and plan and run agree to the last
operation, message and byte. The layouts are drawn as those of whole networks are (`layouts.py`)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import cases
import layouts
import pytest
from observed import Observed
from parallel_pool import RankPool

from shardwise.run import UserError

KINDS = [name for name in cases.ADAPTERS if name.startswith(("lora", "dora"))]
NOT_EXPERTS = ("dora all",)
OF_EXPERTS = [name for name in KINDS if name not in NOT_EXPERTS]
"""Those that a model with experts may have."""
SMALL: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("dense", dict(shard=2, tensor=2), dict(adapter="lora", microbatch=2)),
    ("mixture", dict(shard=2, expert=2, context=2), dict(adapter="lora")),
    ("tied", dict(pipeline=2, replicate=2, schedule="zb-h1"), dict(adapter="lora last")),
    ("dense", dict(tensor=2, context=2, recompute="full"), dict(adapter="lora dropout", layers=1)),
    ("dense", dict(shard=2, zero=2), dict(adapter="lora", dtype="bfloat16")),
    ("wide", dict(shard=2, tensor=2), dict(adapter="qlora", layers=1)),
    ("latent", dict(tensor=2, recompute="full"), dict(adapter="dora all", layers=1)),
]
"""Every axis, with a split backward pass and in 16 bits."""
EDGES: list[tuple[str, dict[str, object], dict[str, object]]] = [
    *[
        (model, layouts.ONE_AXIS[axis], dict(adapter=kind))
        for model in ("dense", "mixture")
        for axis in layouts.AXES
        for kind in KINDS
        if (model, axis) != ("dense", "expert") and not (model == "mixture" and kind in NOT_EXPERTS)
    ],
    *[
        ("mixture", layouts.ONE_AXIS[one] | layouts.ONE_AXIS[other], dict(adapter=OF_EXPERTS[number % len(OF_EXPERTS)]))
        for number, (one, other) in enumerate((a, b) for a in layouts.AXES for b in layouts.AXES if a < b)
    ],
    *[(model, {}, dict(adapter=kind)) for model in cases.MODELS for kind in OF_EXPERTS],
    *[(model, {}, dict(adapter=kind, dtype="bfloat16")) for model in cases.MODELS for kind in OF_EXPERTS],
    *[("wide", {axis: 2}, dict(adapter="qlora", layers=2)) for axis in layouts.AXES if axis != "expert"],
    *[("wide", {a: 2, b: 2}, dict(adapter="qlora single", layers=2)) for a in layouts.AXES[:5] for b in layouts.AXES[:5] if a < b],
    ("wide", dict(shard=2, recompute="full"), dict(adapter="qlora", layers=2, dtype="bfloat16")),
    ("wide", dict(tensor=2, pipeline=2, schedule="zb-h1"), dict(adapter="qlora", dtype="bfloat16")),
    ("dense", dict(tensor=4), dict(adapter="lora")),  # more ranks than key/value heads
    ("dense", dict(tensor=2), dict(adapter="lora", dtype="bfloat16")),
    ("mixture", dict(tensor=2, shard=2, expert=2, expert_tensor=True), dict(adapter="lora", dtype="bfloat16")),
    ("dense", dict(replicate=2), dict(adapter="lora", dtype="bfloat16", reduce_dtype="bfloat16")),
]  # fmt: skip
RANDOM = 40


def drawn(seed: int, number: int) -> layouts.Drawn:
    """A random layout on up to eight ranks, with adapters."""
    generator = random.Random(f"{seed} adapters {number}")
    while True:
        model, layout, train = layouts.draw(generator, world=8)
        train |= dict(optimizer="adamw", adapter=generator.choice(KINDS))
        try:
            cases.make_run(model, layout, **cases.layers_for(layout) | train)
        except UserError:
            continue
        return model, layout, train


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "observed" not in metafunc.fixturenames:
        return
    which: list[object] = [("small", number) for number in range(len(SMALL))]
    if metafunc.config.getoption("--large"):
        more = [("edge", number) for number in range(len(EDGES))] + [("random", number) for number in range(RANDOM)]
        mark = pytest.mark.large(
            "every axis and pair by itself, each kind on each, and 40 layouts of up to eight ranks"
        )
        which += [pytest.param(each, marks=mark) for each in more]
    metafunc.parametrize("observed", which, ids=lambda each: f"{each[0]} {each[1]}", indirect=True, scope="module")


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest, ranks: RankPool) -> Iterator[Observed]:
    """One run of ranks, which all tests of a layout read."""
    kind, number = request.param
    if kind == "random":
        return Observed(ranks, *drawn(request.config.getoption("--seed"), number))
    return Observed(ranks, *(SMALL if kind == "small" else EDGES)[number])


def test_it_begins_as_one_process(observed: Observed) -> None:
    observed.assert_begins_as_one_process()


def test_it_trains_as_one_process(observed: Observed) -> None:
    if observed.run.train.dtype != "float64":
        pytest.skip("16 bits round")
    observed.assert_trains_as_one_process()


def test_only_adapters_are_trained(observed: Observed) -> None:
    moved = {
        name
        for record in observed.records
        for name, (_, value) in record.initial.items()
        if value.size and (value != record.trained["parameters"][name][1]).any()
    }
    assert moved
    assert all(".lora." in name for name in moved), moved


def test_it_computes_and_sends_as_planned(observed: Observed) -> None:
    observed.assert_computes_and_sends_as_planned()


def test_its_messages_are_as_planned(observed: Observed) -> None:
    observed.assert_messages_are_as_planned()


def test_it_holds_what_the_plan_says(observed: Observed) -> None:
    observed.assert_holds_what_the_plan_says()
