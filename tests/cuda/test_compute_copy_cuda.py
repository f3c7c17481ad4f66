"""16-bit copies that the optimizer writes along: steps are those of casts, and nothing lies in memory twice."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from shardwise.measure.verify import random_batch
from shardwise.model.kernels.adamw import adamw
from shardwise.parallel import apply as apply_module
from shardwise.run import Run, run_from_dict
from shardwise.train.step import TrainState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


def small_run(**train: Any) -> Run:
    model = dict(layers=2, hidden=256, heads=4, kv_heads=2, ffn=768, vocab=1000)
    basis = dict(global_batch=4, seq_len=128, dtype="bfloat16", device="cuda", lr=1e-3, deterministic=True)
    return run_from_dict(dict(model=model, train=basis | train))


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_are_those_of_casts(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(compile=compiled)
    results, second, sizes = [], [], []
    train_state = TrainState(run)
    train_state.train_step(random_batch(run, 0)).read()  # what libraries allocate once is no one's
    del train_state
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(apply_module, "keeps_compute_copies", lambda run, gpu: False)
        gc.collect()  # train states are reference cycles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train_state = TrainState(run)
        assert sum(held.compute_copy is not None for held in train_state.parallel.parameters) == (14 if kept else 0)
        results.append([train_state.train_step(random_batch(run, number)).read() for number in range(2)])
        second.append([parameter.detach().clone() for parameter in train_state.model.parameters()])
        results[-1] += [train_state.train_step(random_batch(run, number)).read() for number in range(2, 5)]
        for held in train_state.parallel.parameters:
            if held.compute_copy is not None:
                assert torch.equal(held.compute_copy.tensor, held.parameter.bfloat16())
        sizes.append(torch.cuda.max_memory_allocated() - before)
        del train_state
    (mine, *later), (plain, *plain_later) = results
    assert mine[0] == plain[0]
    assert mine[1] == pytest.approx(plain[1], rel=1e-6)
    for one, other in zip(*second, strict=True):  # the last digit is rounded differently
        assert torch.allclose(one, other, rtol=2e-7, atol=1e-8)
    # In time it is in what is rounded to 16 bits.
    for step, other_step in zip(later, plain_later, strict=True):
        assert step == pytest.approx(other_step, rel=1e-3)
    assert sizes[0] < 1.02 * sizes[1]


@pytest.mark.parametrize("size", [2**20, 13601])
def test_the_copy_is_the_parameter_rounded(size: int) -> None:
    start = [torch.randn(size, device="cuda"), torch.randn(size, device="cuda"), torch.rand(size, device="cuda")]
    gradient = torch.randn(size, device="cuda").bfloat16()
    copy = torch.full_like(gradient, torch.nan)
    kept, alone = [x.clone() for x in start], [x.clone() for x in start]
    settings = torch.tensor([0.3], device="cuda"), 3, 0.01, (0.9, 0.95), 1e-8, 0.1
    adamw(kept[0], gradient, (kept[1], kept[2]), *settings, copy=copy)
    adamw(alone[0], gradient, (alone[1], alone[2]), *settings)
    assert all(torch.equal(a, b) for a, b in zip(kept, alone, strict=True))
    assert torch.equal(copy, kept[0].bfloat16())
