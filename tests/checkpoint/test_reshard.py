"""A checkpoint knows no layout: saved on one and taken up on another, a run computes what one process computes without a stop, to
1e-9 in float64. Random pairs of layouts over all axes, pipeline depths, expert ranks, ZeRO stages and both optimizers."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import numpy as np
import pytest
from parallel_pool import RankPool

from shardwise.checkpoint import reader as reader_module
from shardwise.checkpoint.folder import complete
from shardwise.checkpoint.format import damage, read_manifest, read_shards
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.state import local_shards

TOLERANCE = 1e-9
STEPS, LAST = 1, 2
Layout = dict[str, Any]


@functools.cache
def unbroken(model: str, optimizer: str, layers: int) -> dict[str, Any]:
    return cases.train(0, cases.make_run(model, {}, layers, microbatch=1, optimizer=optimizer, steps=LAST))


def assert_moves(
    ranks: RankPool, out: Path, model: str, optimizer: str, before: tuple[Layout, Any], after: tuple[Layout, Any]
) -> None:
    layers = max(cases.layers_for(layout)["layers"] for layout, _ in (before, after))
    start, end = (
        cases.make_run(model, layout, layers, optimizer=optimizer, steps=LAST, **train)
        for layout, train in (before, after)
    )
    ranks.run(start.layout.world, checkpoint_cases.train_and_save, start, out, STEPS)
    (folder,) = complete(out)
    assert list(damage(folder)) == []
    want = unbroken(model, optimizer, layers)
    seen: dict[str, np.ndarray] = {}
    for got in ranks.run(end.layout.world, checkpoint_cases.resume_and_train, end, out, LAST):
        np.testing.assert_allclose(got["losses"], want["losses"][STEPS:], rtol=TOLERANCE)
        np.testing.assert_allclose(got["norms"], want["norms"][STEPS:], rtol=TOLERANCE)
        assert got["tokens"] == LAST * cases.BATCH * cases.LENGTH
        for name, (where, value) in got["parameters"].items():
            whole = want["parameters"][name][1]
            worst = np.abs(value - whole[where]).max(initial=0) / max(np.abs(whole).max(), 0.1)
            assert worst < TOLERANCE, f"{name} {worst}"
            seen.setdefault(name, np.zeros(whole.shape, bool))[where] = True
    assert all(covered.all() for covered in seen.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        more = range(1, metafunc.config.getoption("--pairs"))
        marked = (pytest.param(pair, marks=pytest.mark.large("more pairs, on up to eight ranks")) for pair in more)
        metafunc.parametrize("pair", [0, *marked])


@pytest.mark.drawn(group="resharding")
def test_random_pairs_of_layouts(ranks: RankPool, tmp_path: Path, pair: int, request: pytest.FixtureRequest) -> None:
    generator = random.Random(f"{request.config.getoption('--seed')} {pair}")
    world = 4 if pair < 2 or pair % 4 else 8
    models = ("mixture", "softmax") if pair % 2 else ("dense", "mixture", "tied", "latent", "softmax")
    model, *before = cases.random_layout(generator, models, axes=pair % 3, world=world)
    _, *after = cases.random_layout(generator, (model,), axes=(pair + 1) % 3, world=world)
    optimizer = generator.choice(["adamw", "muon"])
    # How a step without a pipeline is cut into microbatches is no part of a checkpoint.
    both = [(layout, train if layout["pipeline"] > 1 else {}) for layout, train in (before, after)]
    assert_moves(ranks, tmp_path, model, optimizer, *both)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (dict(pipeline=4), dict(pipeline=2, schedule="zb-v", tensor=2, expert_tensor=True)),
        (dict(shard=2, expert=2), dict(shard=4, expert=4, zero=1)),
        (dict(pipeline=2, schedule="dualpipe"), dict(shard=2, expert=2)),
        (dict(pipeline=2, shard=2), dict(pipeline=4, schedule="dualpipe")),
    ],
    ids=str,
)
@pytest.mark.drawn(group="resharding")
def test_expert_ranks_and_pipeline_depths(ranks: RankPool, tmp_path: Path, before: Layout, after: Layout) -> None:
    assert_moves(ranks, tmp_path, "mixture", "muon", (before, {}), (after, {}))


CUT_OTHERWISE: list[tuple[str, Layout, Layout]] = [
    ("few", dict(shard=4, expert=2), dict(shard=2)),
    ("few", dict(shard=2, expert=2), dict(shard=4, expert=2, zero=2)),
    ("few", dict(shard=4, expert=2), dict(shard=4)),
    ("few", dict(shard=4, zero=1), dict(shard=2, tensor=2, expert_tensor=True)),
    ("few", dict(shard=4, zero=1), dict(shard=2, tensor=2, replicate=2, expert_tensor=True)),
    ("mixture", dict(shard=8, expert=4), dict(shard=8)),
]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("model", "before", "after"), CUT_OTHERWISE, ids=str)
@pytest.mark.drawn(group="resharding")
def test_experts_cut_along_other_dimensions(
    ranks: RankPool, tmp_path: Path, model: str, before: Layout, after: Layout, optimizer: str
) -> None:
    assert_moves(ranks, tmp_path, model, optimizer, (before, {}), (after, {}))


@pytest.mark.drawn(group="resharding")
def test_weights_of_sharded_experts_are_read_whole(ranks: RankPool, tmp_path: Path) -> None:
    """As for generating and for files of other programs."""
    run = cases.make_run("mixture", dict(shard=3), global_batch=6, steps=STEPS)
    ranks.run(3, checkpoint_cases.train_and_save, run, tmp_path, STEPS)
    (folder,) = complete(tmp_path)
    reader = open_checkpoint(folder)
    alone = cases.make_run("mixture", {}, global_batch=6, microbatch=1, steps=STEPS)
    want = {name: value for name, (_, value) in cases.train(0, alone)["parameters"].items()}
    for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
        name = f"layers.1.ffn.experts.{name}"
        assert [shard.offset[dim] for shard in sorted(reader.shards[name], key=lambda p: p.offset)] == [0, 8, 16]
        np.testing.assert_allclose(reader.get(name), want[name], rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose(reader.row(name, 3), want[name][3], rtol=TOLERANCE, atol=TOLERANCE)


def test_only_the_rows_of_a_matrix_that_are_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_cases.train_and_save(0, cases.make_run("mixture", {}, microbatch=1), tmp_path, 1)
    (folder,) = complete(tmp_path)
    reader, name = open_checkpoint(folder), "layers.1.ffn.experts.up"
    whole, read = reader.get(name), []
    fill = reader_module._fill

    def counted(handle: int, into: memoryview, *rest: Any) -> None:
        read.append(len(into))
        fill(handle, into, *rest)

    monkeypatch.setattr(reader_module, "_fill", counted)
    assert (reader.read(name, (1, 8, 4), (2, 6, 20)) == whole[1:3, 8:14, 4:24]).all()
    assert read == [6 * 32 * 8] * 2


def test_each_element_is_written_once_and_ranks_share_the_work(ranks: RankPool, tmp_path: Path) -> None:
    run = cases.make_run("dense", dict(replicate=2, tensor=2))
    written = ranks.run(4, checkpoint_cases.train_and_save, run, tmp_path, 1)
    (folder,) = complete(tmp_path)
    tensors = read_shards(folder, read_manifest(folder))
    covered = {name: np.zeros(shards[0].shape, int) for name, shards in tensors.items()}
    for name, shards in tensors.items():
        for shard in shards:
            covered[name][tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.size, strict=True))] += 1
    assert all((count == 1).all() for count in covered.values())
    # Parameters and both moments of AdamW, in float64; beside them a count of steps each and the ranks' generators.
    sizes = [c.size for name, c in covered.items() if name.startswith("model/")]
    assert sum(sizes) * 8 * 3 < sum(written) < sum(sizes) * 8 * 3 + 4 * 6000
    assert max(written) < 1.3 * sum(written) / 4


@pytest.mark.drawn(group="resharding")
def test_large_shards_are_divided_among_the_ranks_that_hold_them(ranks: RankPool) -> None:
    run = cases.make_run("mixture", dict(shard=2, tensor=2, replicate=2, expert=2, zero=2), layers=2)
    everyone = ranks.run(8, shard_boxes, run, 1024)
    volume: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    seen = set()
    for name, shape, offset, size in (shard for shards in everyone for shard in shards):
        if not name.startswith("random/"):
            assert (name, offset) not in seen
            seen.add((name, offset))
            volume[name], shapes[name] = volume.get(name, 0) + int(np.prod(size)), shape
    assert all(volume[name] == np.prod(shapes[name]) for name in volume)
    experts = [offset for name, offset in seen if name == "model/layers.1.ffn.experts.up"]
    assert len(experts) >= 4


def shard_boxes(rank: int, run: Any, smallest: int) -> list[tuple[Any, ...]]:
    return [
        (s.name, s.shape, s.offset, s.values.shape) for s in local_shards(checkpoint_cases.trained(run, 1), smallest)
    ]
