"""Attention inside of documents and windows on a GPU, against masks in float64; steps and replayed steps with it."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from shardwise.data.batches import Batch
from shardwise.measure.verify import random_batch
from shardwise.model.varlen import VarlenMask, cu_seqlens_of, varlen_attention, varlen_attention_reference
from shardwise.parallel import apply
from shardwise.run import Run, run_from_dict
from shardwise.train import cuda_graph
from shardwise.train.batches import microbatches
from shardwise.train.step import TrainState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def numbers(rows: int, length: int, mean: int, seed: int) -> np.ndarray:
    ends = np.random.default_rng(seed).random((rows, length)) < 1 / mean
    return ends.cumsum(axis=1).astype(np.int32)


@pytest.mark.parametrize("width", [16, 64, 128, 40])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize(("window", "mean"), [(0, 50), (100, 0), (30, 200), (1, 50)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_and_its_gradients(
    width: int, heads: tuple[int, int], window: int, mean: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows, length = 3, 513
    cu_seqlens = torch.from_numpy(cu_seqlens_of(numbers(rows, length, mean, 0))).cuda() if mean else None
    varlen, results = VarlenMask(cu_seqlens, window), []
    drawn = [torch.randn(rows, length, n, width, device="cuda").to(dtype) for n in (heads[0], heads[1], heads[1])]
    for attend, wide in ((varlen_attention, dtype), (varlen_attention_reference, torch.float64)):
        q, k, v = (x.to(wide, copy=True).requires_grad_() for x in drawn)
        out = attend(q, k, v, varlen, width**-0.5)
        out.square().sum().backward()
        results.append([x.double() for x in (out, q.grad, k.grad, v.grad) if x is not None])
    assert len(results[0]) == 4
    for mine, exact in zip(*results, strict=True):
        # A query that sees itself alone has no gradient, nor has its key.
        assert (mine - exact).norm() < 0.01 * exact.norm() + 1e-3 * mine.numel() ** 0.5


def run_of(**train: object) -> Run:
    model = dict(layers=2, hidden=256, heads=4, kv_heads=2, ffn=768, vocab=1000, sliding_window=90)
    basis = dict(global_batch=4, seq_len=256, dtype="bfloat16", device="cuda", lr=1e-3)
    return run_from_dict(dict(model=model, train=basis | train))


def batch_of(run: Run, number: int) -> Batch:
    batch = random_batch(run, number)
    return replace(batch, documents=numbers(*batch.tokens.shape, 60, number))


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_are_those_of_masks(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, results = run_of(compile=compiled), []
    for bounds in (True, False):
        for place in (apply, microbatches):
            monkeypatch.setattr(place, "uses_varlen_attention", lambda run, gpu, bounds=bounds: bounds)
        train_state = TrainState(run)
        results.append([train_state.train_step(batch_of(run, number)).read()[:2] for number in range(5)])
    for mine, plain in zip(*results, strict=True):
        assert mine == pytest.approx(plain, rel=0.01)


def test_documents_that_change_are_not_compiled_anew() -> None:
    run = run_of(compile=True)
    train_state = TrainState(run)

    def step(number: int, mean: int) -> int:
        batch = random_batch(run, number)
        documents = numbers(*batch.tokens.shape, mean, number)
        train_state.train_step(replace(batch, documents=documents)).read()
        return len(cu_seqlens_of(documents))

    met = {step(number, mean) for number, mean in enumerate((60, 20, 60))}
    counters.clear()
    new = {step(number, mean) for number, mean in enumerate((3, 8, 120, 500))}
    assert len(new - met) > 2
    assert not counters["stats"].get("unique_graphs")


def test_replayed_steps_are_launched_ones() -> None:
    run, results = run_of(compile=False, deterministic=True, cuda_graph=True), []
    try:
        for replayed in (True, False):
            train_state = TrainState(run)
            if replayed:
                cuda_graph.attach(train_state)
            results.append([train_state.train_step(batch_of(run, number)).read()[:2] for number in range(8)])
            assert (train_state.replay is not None and train_state.replay.graph is not None) is replayed
    finally:
        torch.use_deterministic_algorithms(False)
    assert results[0] == results[1]


def test_no_mask_is_held() -> None:
    run = run_of(compile=False, seq_len=8192, global_batch=1)
    train_state = TrainState(run)
    for number in range(2):
        torch.cuda.reset_peak_memory_stats()
        train_state.train_step(batch_of(run, number)).read()
    most = torch.cuda.max_memory_allocated()
    with pytest.MonkeyPatch.context() as patch:
        for place in (apply, microbatches):
            patch.setattr(place, "uses_varlen_attention", lambda run, gpu: False)
        del train_state
        gc.collect()
        train_state = TrainState(run)
        for number in range(2):
            torch.cuda.reset_peak_memory_stats()
            train_state.train_step(batch_of(run, number)).read()
    assert torch.cuda.max_memory_allocated() - most > 8192**2
