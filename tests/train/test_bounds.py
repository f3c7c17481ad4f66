"""Steps whose attention is told the bounds of what is seen, against steps with masks: the same losses, and the same operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.data.batches import Batch
from shardwise.measure.counts.work import WorkCounter
from shardwise.measure.verify import random_batch
from shardwise.parallel import apply
from shardwise.run import Run, run_from_dict
from shardwise.train.batches import microbatches
from shardwise.train.step import TrainState


def batch_of(run: Run, number: int, documents: bool) -> Batch:
    batch = random_batch(run, number)
    if not documents:
        return batch
    ends = np.random.default_rng(number).random(batch.tokens.shape) < 0.1
    return replace(batch, documents=ends.cumsum(axis=1).astype(np.int32))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.drawn(4, "documents", "window", "recompute")
def test_bounds_or_masks(documents: bool, window: int, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dict(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=60, sliding_window=window)
    train = dict(global_batch=4, microbatch=2, seq_len=32, dtype="float64", device="cpu")
    run = run_from_dict(dict(model=model, train=train, layout=dict(recompute=recompute)))
    losses, works = [], []
    for bounds in (True, False):
        for place in (apply, microbatches):
            monkeypatch.setattr(place, "uses_varlen_attention", lambda run, gpu, bounds=bounds: bounds)
        train_state = TrainState(run)
        made = train_state.microbatches(batch_of(run, 0, documents))
        shapes = {one["documents"].dim() for one in made if "documents" in one}
        assert shapes == ({1 if bounds else 2} if documents else set())
        losses.append([train_state.train_step(batch_of(run, number, documents)).read()[:2] for number in range(3)])
        with WorkCounter(train_state) as counter:
            train_state.train_step(batch_of(run, 3, documents)).read()
        works.append(counter.work.flops)
    assert losses[0] == [pytest.approx(one, rel=1e-12) for one in losses[1]]
    assert works[0].keys() == works[1].keys()
    for part, passes in works[0].items():
        assert passes == pytest.approx(works[1][part])
