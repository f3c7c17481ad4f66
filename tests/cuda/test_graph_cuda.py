"""Steps that are recorded once and replayed: the same numbers as launched ones, and launched where they must be."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardwise.data.batches import Batch
from shardwise.measure.verify import random_batch
from shardwise.run import Run, run_from_dict
from shardwise.train import cuda_graph
from shardwise.train.step import TrainState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 8


@pytest.fixture(autouse=True)
def free_again() -> Iterator[None]:
    """A deterministic run makes the process so."""
    yield
    torch.use_deterministic_algorithms(False)


def small_run(model: dict[str, Any], layout: dict[str, Any], train: dict[str, Any]) -> Run:
    shape = dict(layers=2, hidden=256, heads=4, kv_heads=2, ffn=768, vocab=1000) | model
    basis = dict(global_batch=4, seq_len=128, dtype="bfloat16", device="cuda", lr=1e-3, deterministic=True)
    return run_from_dict(dict(model=shape, layout=layout, train=basis | train))


def trained(run: Run, replayed: bool, batches: list[Batch]) -> tuple[list[tuple[float, float]], TrainState, list[str]]:
    train_state, said = TrainState(run), []
    if replayed:
        cuda_graph.attach(train_state, said.append)
    return [train_state.train_step(batch).read()[:2] for batch in batches], train_state, said


@pytest.mark.parametrize(
    ("model", "layout", "train"),
    [
        ({}, {}, dict(compile=False)),
        ({}, {}, dict(compile=True)),
        ({}, {}, dict(microbatch=2)),
        ({}, dict(recompute="full"), {}),
        (dict(tied_embeddings=True), dict(recompute="attention"), {}),
        (dict(experts=4, experts_per_token=2, expert_ffn=256), {}, {}),
        ({}, {}, dict(fp8="tensorwise")),
        ({}, {}, dict(dtype="float32")),
    ],
)
def test_replayed_steps_are_launched_ones(model: dict[str, Any], layout: dict[str, Any], train: dict[str, Any]) -> None:
    run = small_run(model, layout, dict(cuda_graph=True) | train)
    batches = [random_batch(run, number) for number in range(STEPS)]
    want, launched, _ = trained(run, False, batches)
    got, replayed, said = trained(run, True, batches)
    assert said == ["steps are replayed as a CUDA graph from here on"]
    assert got == want
    for mine, theirs in zip(replayed.model.parameters(), launched.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert len({loss for loss, _ in got}) == STEPS  # every batch had its turn
    replayed.evaluate(lambda numbers: random_batch(run, 0), torch.arange(4).numpy())
    again = [train_state.train_step(batches[0]).read()[:2] for train_state in (launched, replayed)]
    assert again[0] == again[1]


def test_a_small_model_is_found_to_wait_for_its_host() -> None:
    run = small_run({}, {}, dict(compile=False, deterministic=False))
    for _ in range(3):  # other processes may use the GPU meanwhile, which then is the slower one
        _, train_state, said = trained(run, True, [random_batch(run, number) for number in range(STEPS)])
        if said:
            break
    assert said == ["steps are replayed as a CUDA graph from here on: the host was slower than the GPU"]
    assert train_state.replay.graph is not None  # type: ignore[union-attr]


def test_a_large_batch_is_not() -> None:
    model = dict(hidden=2048, heads=16, kv_heads=8, ffn=8192, vocab=32000)
    run = small_run(model, {}, dict(compile=False, deterministic=False, seq_len=4096, global_batch=8))
    _, train_state, said = trained(run, True, [random_batch(run, number) for number in range(STEPS)])
    assert not said
    assert train_state.replay.graph is None  # type: ignore[union-attr]


def test_another_shape_is_launched() -> None:
    run = small_run({}, {}, dict(cuda_graph=True, compile=False))
    batches = [random_batch(run, number) for number in range(STEPS)]
    odd = random_batch(run, STEPS)
    shorter = Batch(odd.tokens[:, :64], odd.targets[:, :64], None, None)
    want, _, _ = trained(run, False, [*batches, shorter, batches[0]])
    got, _, _ = trained(run, True, [*batches, shorter, batches[0]])
    assert got == want


def test_what_waits_for_the_device_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run({}, {}, dict(cuda_graph=True, compile=False))
    batches = [random_batch(run, number) for number in range(STEPS)]
    want, _, _ = trained(run, False, batches)
    inner = TrainState.passes_of

    def waiting(self: TrainState, microbatches: Any) -> torch.Tensor:
        loss = inner(self, microbatches)
        loss.item()
        return loss

    monkeypatch.setattr(TrainState, "passes_of", waiting)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.manual_seed(run.train.seed)
    drawn = torch.randn(8, device="cuda")
    got, train_state, said = trained(run, True, batches)
    assert got == want
    assert "could not be captured" in said[0]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(torch.randn(8, device="cuda"), drawn)  # as before: nothing has been drawn in the steps
    del train_state
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**25  # the memory of the recording is free again
