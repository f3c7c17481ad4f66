"""Training in 8 bits on several ranks: shards of matrices are gathered in 8 bits and give the numbers of the whole matrix, and
what is sent, computed and kept is what the plan says."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool

from shardwise.measure.verify import TOLERANCE, Verdict, counted, planned, random_batch
from shardwise.model.layers import Linear
from shardwise.model.quantized.fp8 import Fp8Matrix
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.traffic import by_group
from shardwise.run import Run
from shardwise.train.step import TrainState

Layout = dict[str, Any]


def make_run(layout: Layout, fp8: str, model: str = "dense", **train: Any) -> Run:
    base = dict(dtype="bfloat16", fp8=fp8, steps=2, lr=1e-3, microbatch=2, layers=2)
    return cases.make_run(model, layout, **base | train)


@contextmanager
def compiled_without_code(run: Run) -> Iterator[None]:
    """Where a run compiles, graphs are made and split into passes as always, but run as they are: no compiler is needed."""
    real = torch.compile
    torch.compile = functools.partial(real, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch.compile = real


def trained(rank: int, run: Run) -> dict[str, Any]:
    with compiled_without_code(run):
        return cases.train(rank, run, documents=False)


@functools.cache
def alone(fp8: str, **train: Any) -> dict[str, Any]:
    return trained(0, make_run({}, fp8, **train))


SHARDED: list[Any] = [
    ("tensorwise", dict(shard=2), {}),
    ("rowwise", dict(shard=2, pipeline=2, schedule="zb-h1"), {}),
    ("rowwise", dict(pipeline=4, schedule="bpipe"), dict(layers=4, microbatch=1)),
    ("tensorwise", dict(pipeline=4, shard=2, schedule="bpipe"), dict(layers=4, microbatch=1)),
    ("tensorwise", dict(shard=3), dict(global_batch=6)),  # 16 rows over three ranks: the last one's are padded
    ("rowwise", dict(shard=3), dict(global_batch=6)),  # which scales by row cannot be, so 16 bits are gathered
    # Compiled on one rank it is in tests/model/test_fp8.py.
    ("tensorwise", dict(shard=2), dict(compile=True)),
    *(
        (*each, {})
        for each in (
            ("rowwise", dict(shard=2)),
            ("tensorwise", dict(shard=4, zero=1)),
            ("tensorwise", dict(shard=2, replicate=2, zero=2)),
            ("rowwise", dict(shard=2, replicate=2)),
            ("tensorwise", dict(shard=2, pipeline=2, schedule="zb-h1")),
            ("rowwise", dict(pipeline=2, schedule="zb-h1")),
        )
    ),
]


@pytest.mark.parametrize(("fp8", "layout", "train"), SHARDED, ids=str)
@pytest.mark.drawn(group="fp8")
def test_shards_give_the_numbers_of_the_whole(ranks: RankPool, fp8: str, layout: Layout, train: dict[str, Any]) -> None:
    run = make_run(layout, fp8, **train)
    want = alone(fp8, **{key: value for key, value in train.items() if key != "compile"})
    exact = fp8 == "tensorwise" or layout.get("shard") != 3
    for got in ranks.run(run.layout.world, trained, run):
        # Before anything was updated the same numbers were multiplied; only the sum of losses rounds otherwise.
        assert got["losses"][0] == pytest.approx(want["losses"][0], rel=2e-7 if exact else 1e-3)
        # A shard's gradients come in bfloat16, as `fully_shard` wants those of a layer alike; alone they are float32.
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-4 if exact else 1e-3)
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=2e-3 if exact else 2e-2)
        np.testing.assert_allclose(got["evaluated"], want["evaluated"], rtol=1e-4)


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.drawn(group="fp8")
def test_tensor_ranks_have_scales_of_their_own(ranks: RankPool, fp8: str) -> None:
    layout = dict(tensor=2, shard=2) if fp8 == "rowwise" else dict(tensor=4)  # four are more than the key/value heads
    for got in ranks.run(4, trained, make_run(layout, fp8)):
        np.testing.assert_allclose(got["losses"], alone(fp8)["losses"], rtol=1e-3)


def verified(rank: int, run: Run) -> Verdict:
    train_state = TrainState(run)
    batch = random_batch(run, train_state.mesh.data_index)
    train_state.train_step(batch)
    account, same, actions = counted(train_state, batch)
    return Verdict(rank, planned(run, rank), account, same, actions)


PLANNED: list[Any] = [
    ("rowwise", "dense", dict(shard=2, pipeline=2, schedule="zb-h1")),
    ("tensorwise", "mixture", dict(shard=2, expert=2, recompute="full")),
    ("tensorwise", "dense", {}),
    ("tensorwise", "mixture", dict(pipeline=4, schedule="bpipe")),
    ("rowwise", "dense", dict(shard=2)),
    ("tensorwise", "tied", dict(shard=4, zero=1)),
    ("tensorwise", "dense", dict(shard=2, recompute="full")),
    ("tensorwise", "dense", dict(shard=2, tensor=2)),
    ("rowwise", "dense", dict(tensor=4)),
    ("tensorwise", "dense", dict(shard=2, pipeline=2, schedule="zb-h1")),
    ("rowwise", "dense", dict(pipeline=2, schedule="zb-h1")),
    ("tensorwise", "mixture", dict(shard=2, expert=2)),
    ("tensorwise", "latent", dict(shard=2, replicate=2, zero=2)),
]


@pytest.mark.parametrize(("fp8", "model", "layout"), PLANNED, ids=str)
@pytest.mark.drawn(group="fp8")
def test_plan_equals_run(ranks: RankPool, fp8: str, model: str, layout: Layout) -> None:
    run = make_run(layout, fp8, model)
    verdicts = ranks.run(run.layout.world, verified, run) if run.layout.world > 1 else [verified(0, run)]
    for verdict in verdicts:
        assert verdict.schedule
        assert not verdict.beyond(TOLERANCE), (verdict.rank, verdict.beyond(TOLERANCE)[:5])


def test_a_gathered_number_is_one_byte() -> None:
    sizes = {}
    for fp8 in ("none", "tensorwise", "rowwise"):
        run = make_run(dict(shard=2), fp8)
        sizes[fp8] = by_group(PlannedRank(run, 0))["zero", "all_gather"].bytes
    place = PlannedRank(run, 0)
    matrices = 2 * sum(p.numel for p in place.layer_parameters(False) if p.is_gemm_weight)
    rows = 2 * sum(p.shape[0] for p in place.layer_parameters(False) if p.is_gemm_weight)
    # Half of them from the other rank, forward and backward of two microbatches.
    assert sizes["none"] - sizes["tensorwise"] == 4 * matrices // 2
    assert sizes["rowwise"] - sizes["tensorwise"] == 4 * 4 * rows // 2


def test_a_matrix_in_8_bits_is_to_others_what_it_stands_for() -> None:
    eight = torch.randn(16, 32).to(torch.float8_e4m3fn)
    for scale in (torch.tensor(0.5), 2.0 ** torch.arange(16.0)[:, None]):
        matrix = Fp8Matrix(eight, scale, torch.bfloat16).requires_grad_()
        x = torch.randn(3, 32, dtype=torch.bfloat16)
        out = Linear.gemm(x, matrix, None)
        assert torch.equal(out, x @ (eight.float() * scale).to(torch.bfloat16).t())
        out.sum().backward()
        assert matrix.grad is not None
        torch.testing.assert_close(matrix.grad.float(), x.float().sum(0).expand(16, 32), rtol=2**-7, atol=1e-2)
        assert matrix.detach().fp8_data is not None
