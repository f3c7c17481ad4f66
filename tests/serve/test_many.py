"""Whatever the layout, requests are answered with the tokens and logprobs of the one-process forward pass without a cache; and what
a rank holds is what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import pytest
from many_ranks import check_layout
from parallel_pool import RankPool

from shardwise.run import LayoutConfig, UserError, read_served
from shardwise.run.parameters import first_parameters, last_parameters, layer_parameters
from shardwise.run.ranks.served import ServingRank

SMALL = [
    (dict(tensor=2), ["gpt", "mixtral"]),
    (dict(tensor=2, pipeline=2), ["qwen", "deepseek"]),
    (dict(tensor=2, shard=2, expert=4), ["deepseek"]),
    (dict(replicate=2, pipeline=2), ["window"]),
]
SPECULATING: list[tuple[dict[str, int], str, str]] = [
    (dict(tensor=2), "qwen", "ngram"),
    (dict(tensor=2, pipeline=2), "deepseek", "draft"),
    (dict(replicate=2), "gpt", "draft"),
]


def world_of(axes: dict[str, int]) -> int:
    return prod(size for axis, size in axes.items() if axis != "expert")


def name_of(axes: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in axes.items())


def all_layouts() -> Iterator[tuple[dict[str, int], list[str]]]:
    """Every product of axes up to 8 ranks, each with a family that needs its layers and heads, and others by turns."""
    dense, sparse = ["llama", "gpt", "window", "qwen", "parallel"], ["mixtral", "deepseek"]
    for number, sizes in enumerate(product((1, 2, 4, 8), repeat=5)):
        replicate, shard, tensor, pipeline, expert = sizes
        ranks = shard * tensor
        if not 2 <= replicate * ranks * pipeline <= 8 or expert % shard or ranks % expert:
            continue
        axes = dict(replicate=replicate, shard=shard, tensor=tensor, pipeline=pipeline, expert=expert)
        fits_small = tensor <= 4 and pipeline <= 4 and expert <= 4
        families = [sparse[number % 2]] if expert > 1 else [dense[number % 5], sparse[number % 2]]
        families = (families if fits_small else []) + ["deep experts"] + (["deep"] if expert == 1 else [])
        yield {axis: size for axis, size in axes.items() if size > 1}, families


ALL = list(all_layouts())


@pytest.mark.parametrize(("axes", "families"), SMALL, ids=[name_of(axes) for axes, _ in SMALL])
@pytest.mark.drawn(group="ranks that serve")
def test_layouts_answer_as_the_uncached_model(
    axes: dict[str, int], families: list[str], ranks: RankPool, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--seed")
    ranks.run(world_of(axes), check_layout, axes, [(family, f"{seed} {family}") for family in families])


@pytest.mark.parametrize(("axes", "family", "way"), SPECULATING, ids=[name_of(axes) for axes, _, _ in SPECULATING])
@pytest.mark.drawn(group="ranks that serve")
def test_layouts_verify_guesses(
    axes: dict[str, int], family: str, way: str, ranks: RankPool, request: pytest.FixtureRequest
) -> None:
    """Those of the small tier's drawn settings that say how; the first rank of each replica has the draft model."""
    seed = request.config.getoption("--seed")
    ranks.run(world_of(axes), check_layout, axes, [(family, f"{seed} {way}")], "cpu", way)


@pytest.mark.large("every axis and product of axes up to eight ranks, of which the small tier has the most different")
@pytest.mark.parametrize(("axes", "families"), ALL, ids=[name_of(axes) for axes, _ in ALL])
def test_every_layout_answers_as_the_uncached_model(
    axes: dict[str, int], families: list[str], ranks: RankPool, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--seed")
    cases = [(family, f"{seed} {family} {n}") for family in families for n in range(2)]
    ranks.run(world_of(axes), check_layout, axes, cases)


@pytest.mark.parametrize("axes", [dict(tensor=4), dict(shard=2, tensor=4, expert=4), dict(tensor=4, expert=2)])
def test_the_ranks_of_a_stage_hold_all_of_it_and_nothing_twice(axes: dict[str, int]) -> None:
    from engines import model_of

    layout, config = LayoutConfig(**axes), model_of("deep experts").config
    places = [ServingRank(layout, rank) for rank in range(layout.world)]
    entries = [*first_parameters(config), *layer_parameters(config, True), *last_parameters(config)]
    for entry in entries:
        boxes = {place.box(entry) for place in places}
        assert sum(prod(size) for _, size in boxes) == prod(entry.shape), entry.name
        cut = entry.tensor_dim is not None
        assert len(boxes) == (layout.world if entry.routed else layout.tensor if cut else 1), entry.name


@pytest.mark.parametrize(
    ("overrides", "phrase"),
    [
        (["layout.tensor=3"], "3 does not divide model.heads"),
        (["layout.shard=2"], "only splits experts"),
        (["layout.context=2"], "only splits experts"),
        (["layout.expert=2"], "the model has none"),
        (["layout.expert=2", "model.experts=4", "model.experts_per_token=1"], "add none; layout.tensor = 2 would do"),
        (["layout.tensor=4", "layout.expert=4", "model.experts=6", "model.experts_per_token=1"], "does not divide model.experts"),
        (["layout.pipeline=9"], "each stage needs a layer"),
        (["layout=auto"], "`shardwise plan` searches"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_serve_are_refused_with_a_sentence(overrides: list[str], phrase: str) -> None:
    with pytest.raises(UserError, match=phrase):
        read_served(None, overrides)


def test_a_trained_layout_says_nothing_of_where_it_is_served(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "run.toml"
    file.write_text("[train]\nglobal_batch = 8\nseq_len = 96\n[layout]\nshard = 2\ntensor = 2\n[cluster]\nnodes = 2\n")
    assert read_served(file).layout.world == 1
    # Nor do a batch and a sequence that would not divide.
    assert read_served(file, ["layout.replicate=3", "layout.tensor=4", "train.seq_len=97"]).layout.world == 12
