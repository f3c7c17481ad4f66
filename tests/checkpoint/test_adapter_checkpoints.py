"""Checkpoints of adapters hold adapters alone and name their base: taken up on any layout, merged as they are read, and refused
beside other weights than those they were trained with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool

from shardwise.checkpoint.folder import complete
from shardwise.checkpoint.huggingface import from_hf, to_hf
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.resume import load_weights
from shardwise.checkpoint.weights import load_model
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.model.adapters import adapters_off
from shardwise.run import Run, UserError
from shardwise.train.step import TrainState

STEPS, LAST = 1, 3


def begin(run: Run) -> TrainState:
    """A train state with the weights it starts from."""
    state = TrainState(run)
    load_weights(state, ByteTokenizer(), print)
    return state


def train_and_save(rank: int, run: Run, out: Path, steps: int) -> None:
    state = begin(run)
    cases.steps(state, 0, steps, True)
    saver = checkpoint_cases.saver_of(state, out)
    saver.save(state, more=dict(note=[1, 2]))
    assert saver.finish() == ""


def unbroken(rank: int, run: Run) -> dict[str, Any]:
    state = begin(run)
    losses, norms = cases.steps(state, 0, LAST, True)
    return dict(losses=losses, norms=norms, parameters=cases.held_parameters(state))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A run to be tuned."""
    checkpoint_cases.train_and_save(0, cases.make_run("mixture", {}, layers=2, microbatch=1), tmp_path / "base", 1)
    return tmp_path / "base"


def tuned(base: Path, layout: dict[str, Any] | None = None, kind: str = "lora", **train: Any) -> Run:
    return cases.make_run("mixture", layout or {}, layers=2, adapter=kind, weights=str(base), steps=LAST, **train)


@pytest.mark.drawn(group="resharding")
def test_it_resumes_bit_for_bit_and_on_another_layout(ranks: RankPool, tmp_path: Path, base: Path) -> None:
    run = tuned(base, microbatch=2)
    want = unbroken(0, run)
    train_and_save(0, run, tmp_path / "run", STEPS)
    got = checkpoint_cases.resume_and_train(0, run, tmp_path / "run", LAST)
    assert got["losses"] == want["losses"][STEPS:]
    for name, (_, value) in got["parameters"].items():
        assert np.array_equal(value, want["parameters"][name][1]), name
    other = tuned(base, dict(shard=2, tensor=2, expert=2), microbatch=2)
    for part in ranks.run(4, checkpoint_cases.resume_and_train, other, tmp_path / "run", LAST):
        np.testing.assert_allclose(part["losses"], want["losses"][STEPS:], rtol=1e-9)
        for name, (where, value) in part["parameters"].items():
            np.testing.assert_allclose(value, want["parameters"][name][1][where], atol=1e-9)


@pytest.mark.parametrize("kind", ["lora", "dora all"])
def test_it_holds_adapters_alone_and_loads_merged(tmp_path: Path, base: Path, kind: str) -> None:
    run = tuned(base, kind=kind, microbatch=2)
    state = begin(run)
    cases.steps(state, 0, 2, True)
    saver = checkpoint_cases.saver_of(state, tmp_path / "run")
    saver.save(state)
    assert saver.finish() == ""
    (folder,) = complete(tmp_path / "run")
    assert all(".lora." in name for name in open_checkpoint(folder).names)
    merged, _ = load_model(tmp_path / "run")
    plain, _ = load_model(base)
    tokens = torch.from_numpy(cases.batch(7, False).tokens[:2])
    model = state.parallel.models[0].eval()
    with torch.no_grad():
        assert (merged(tokens).result - model(tokens).result).abs().max() < 1e-9
        with adapters_off(model):
            assert torch.equal(plain(tokens).result, model(tokens).result)
        assert (merged(tokens).result - plain(tokens).result).abs().max() > 1e-3


def test_it_is_merged_into_a_hugging_face_folder(tmp_path: Path) -> None:
    start = cases.make_run("softmax", {}, layers=2, microbatch=1)
    checkpoint_cases.train_and_save(0, start, tmp_path / "base", 1)
    run = cases.make_run("softmax", {}, layers=2, microbatch=1, adapter="lora", weights=str(tmp_path / "base"))
    train_and_save(0, run, tmp_path / "run", 2)
    with pytest.raises(UserError, match="--merge merges them"):
        to_hf(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(UserError, match="no adapters"):
        to_hf(tmp_path / "base", tmp_path / "hf", merge=True)
    to_hf(tmp_path / "run", tmp_path / "hf", merge=True)
    from_hf(tmp_path / "hf", tmp_path / "back")
    merged, back = load_model(tmp_path / "run")[0], load_model(tmp_path / "back")[0]
    for (name, one), other in zip(merged.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_other_weights_are_refused(tmp_path: Path, base: Path) -> None:
    train_and_save(0, tuned(base, microbatch=2), tmp_path / "run", STEPS)
    shutil.copytree(base, tmp_path / "other")
    checkpoint_cases.resume_and_train(
        0, tuned(tmp_path / "other", microbatch=2), tmp_path / "run", LAST
    )  # a copy will do
    start = cases.make_run("mixture", {}, layers=2, microbatch=1, seed=5)
    checkpoint_cases.train_and_save(0, start, tmp_path / "stranger", 1)
    with pytest.raises(UserError, match="holds other weights"):
        checkpoint_cases.resume_and_train(0, tuned(tmp_path / "stranger", microbatch=2), tmp_path / "run", LAST)
    shutil.rmtree(base)
    with pytest.raises(UserError, match="their base weights are not at"):
        load_model(tmp_path / "run")


@pytest.mark.parametrize(("model", "layers"), [("wide", 1), ("wide mixture", 2)])
@pytest.mark.drawn(group="resharding")
def test_weights_in_4_bits_are_merged_as_they_were_met(
    ranks: RankPool, tmp_path: Path, model: str, layers: int
) -> None:
    start = cases.make_run(model, {}, layers=layers, microbatch=1)
    checkpoint_cases.train_and_save(0, start, tmp_path / "base", 1)
    run = cases.make_run(
        model, {}, layers=layers, microbatch=2, adapter="qlora", weights=str(tmp_path / "base"), steps=LAST
    )
    state = begin(run)
    cases.steps(state, 0, 2, True)
    saver = checkpoint_cases.saver_of(state, tmp_path / "run")
    saver.save(state, more=dict(note=[1, 2]))
    assert saver.finish() == ""
    merged, _ = load_model(tmp_path / "run")
    tokens = torch.from_numpy(cases.batch(7, False).tokens[:2])
    with torch.no_grad():
        want = state.parallel.models[0].eval()(tokens).result
        assert (merged(tokens).result - want).abs().max() < 1e-6  # 4-bit values are float32 numbers
    losses, _ = cases.steps(state, 2, LAST, True)
    other = cases.make_run(
        model, dict(shard=2), layers=layers, microbatch=2, adapter="qlora", weights=str(tmp_path / "base"), steps=LAST
    )
    for part in ranks.run(2, checkpoint_cases.resume_and_train, other, tmp_path / "run", LAST):
        np.testing.assert_allclose(part["losses"], losses, rtol=1e-9)
