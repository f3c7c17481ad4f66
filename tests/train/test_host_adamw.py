"""An optimizer on the host gives the bits of one on the device, and its memory is the plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.ledger import Memory
from shardwise.measure.counts.memory import measure_memory
from shardwise.measure.verify import random_batch
from shardwise.plan.plan import plan
from shardwise.plan.trainer.state import hosted, state_bytes
from shardwise.run import Run, UserError, run_from_dict
from shardwise.train.step import TrainState


def made(optimizer: str, folder: str = "", **train: Any) -> Run:
    settings = dict(global_batch=2, microbatch=2, seq_len=8, device="cpu", lr=1e-2) | train
    model = dict(layers=2, hidden=16, heads=2, vocab=37)
    return run_from_dict(
        dict(model=model, train=settings, memory=dict(optimizer=optimizer, host_threads=2, folder=folder))
    )


def trained(run: Run) -> tuple[list[Any], list[torch.Tensor]]:
    train_state = TrainState(run)
    results = [train_state.train_step(random_batch(run, step)) for step in range(3)]
    held = train_state.parallel.parameters
    states = [value for n in range(len(held)) for value in train_state.optimizer.state_of(n).values()]
    return [one.read()[:2] for one in results], [h.parameter.detach() for h in held] + states


@pytest.mark.parametrize(
    "train",
    [dict(dtype="float32"), dict(dtype="bfloat16", microbatch=1), dict(dtype="bfloat16", clip=0.0)],
    ids=["float32", "microbatches are added up on the host", "no clipping"],
)
def test_a_host_updates_to_the_bits_of_a_device(train: dict[str, Any]) -> None:
    (metrics, here), (others, there) = (trained(made(where, **train)) for where in ("device", "host"))
    assert metrics == others
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine, theirs)


def test_slices_of_a_parameter_are_updated_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.train.optimizers.host_adamw.SLICE", 64)
    (_, here), (_, there) = (trained(made(where, dtype="float32")) for where in ("device", "host"))
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine, theirs)


def test_moments_in_files_are_the_same_bits_and_not_in_memory(tmp_path: Path) -> None:
    (metrics, here), (others, there) = (trained(made(where, str(tmp_path))) for where in ("device", "disk"))
    assert metrics == others
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine, theirs)
    run = made("disk", str(tmp_path))
    train_state = TrainState(run)
    train_state.train_step(random_batch(run))
    measured = measure_memory(train_state, random_batch(run))
    every = hosted(run)
    assert measured["host"] == every.held == hosted(made("host")).held - every.moments
    # Resuming puts moments back into files.
    before = {key: value.clone() for key, value in train_state.optimizer.state_of(0).items()}
    train_state.optimizer.set_state(0, before)
    after = train_state.optimizer.state_of(0)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert train_state.optimizer.host is not None
    assert train_state.optimizer.host.files is not None
    files = Path(train_state.optimizer.host.files.name).iterdir()
    assert sum(path.stat().st_size for path in files) >= every.moments
    with pytest.raises(UserError, match="there is no such folder"):
        TrainState(made("disk", str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="needs a folder"):
        made("disk")


@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.drawn(1)
def test_both_memories_are_planned_to_the_byte(microbatch: int) -> None:
    run = made("host", dtype="bfloat16", microbatch=microbatch)
    train_state = TrainState(run)
    train_state.train_step(random_batch(run))
    measured = measure_memory(train_state, random_batch(run))
    assert measured["host"] == hosted(run).held
    assert {name: measured[name] for name in ("parameters", "gradients", "optimizer")} == state_bytes(run, 0)
    assert measured["optimizer"] == measured["gradients"] == 0


def test_a_slower_host_makes_a_longer_step_once_the_forward_pass_is_over() -> None:
    run = dict(model=dict(preset="llama3-8b"), cluster=dict(chip="h200"))
    train = dict(global_batch=4, microbatch=4, seq_len=8192, dtype="bfloat16", device="cuda")

    def planned(**memory: Any) -> tuple[float, Memory]:
        account = plan(run_from_dict(run | dict(train=train, memory=memory, layout=dict(recompute="full")))).account
        return account.step_seconds, account.memory

    resident, where = planned()
    quick, elsewhere = planned(optimizer="host", update_gbs=1e4)
    slow, _ = planned(optimizer="host", update_gbs=100)
    slower, _ = planned(optimizer="host", update_gbs=50)
    assert elsewhere.peak < 45 * 2**30 < where.peak
    assert quick < 1.15 * resident
    # Twice the time of the update, and all of what it is longer by is waited for.
    update = hosted(run_from_dict(run | dict(train=train, memory=dict(optimizer="host")))).updated
    assert slower - slow == pytest.approx(update / 100e9, rel=0.02)


def test_what_does_not_go_with_it_is_said() -> None:
    wrong = dict(layout=dict(shard=2), train=dict(optimizer="muon", recheck_every=3), memory=dict(optimizer="host"))
    with pytest.raises(UserError) as error:
        run_from_dict(wrong)
    for part in ("the layout has 2 ranks", "not with muon", "compares gradients on the device"):
        assert part in str(error.value)
