"""The noise of gradients against its definition: the variance over sequences of the gradient of each, computed one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.cli.main import main
from shardwise.data.open import open_data
from shardwise.measure.noise import measure_noise
from shardwise.run import UserError, run_from_dict
from shardwise.train.step import TrainState

KEYS = dict(
    model=dict(layers=1, hidden=16, heads=2), train=dict(seq_len=16, global_batch=8, steps=50, dtype="float64", device="cpu")
)  # fmt: skip


@pytest.mark.drawn(group="profiles")
def test_signal_and_variance_are_those_of_single_sequences() -> None:
    run = run_from_dict(KEYS)
    found = measure_noise(run, 0, draws=30)
    one = run_from_dict(KEYS | dict(train=dict(KEYS["train"]) | dict(global_batch=1)))
    state, data = TrainState(one), open_data(run)
    gradients = []
    for at in range(200):
        state.train_step(data.train.take(np.array([at])), accept=lambda loss, norm: False)
        gradients.append(np.concatenate([h.grad.numpy().ravel() for h in state.parallel.parameters]))
    each = np.array(gradients) / state.full_count
    assert found.variance == pytest.approx(each.var(0, ddof=1).sum(), rel=0.35)
    assert found.signal == pytest.approx((each.mean(0) ** 2).sum() - each.var(0).sum() / len(each), rel=0.35)
    assert found.critical_batch == pytest.approx(found.variance / found.signal * 16)


def test_noise_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\nlayers = 1\nhidden = 16\nheads = 2\n[train]\nseq_len = 16\nglobal_batch = 8\nsteps = 50\n"
    )
    assert main(["scale", "noise", str(path), "--steps", "2", "--draws", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["variance"] > 0
    with pytest.raises(UserError, match="too few"):
        measure_noise(run_from_dict(KEYS | dict(train=dict(seq_len=16, global_batch=1))), 1)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(layout="auto", cluster=dict(chip="h100")), "layout: the noise is measured on one device"),
        (dict(layout=dict(replicate=2)), "layout: the noise is measured on one device"),
        (dict(objective=dict(kind="grpo", rewards=["a.py:b"], completion_tokens=4)), "objective.kind: grpo draws its own data"),
    ],
)  # fmt: skip
def test_noise_of_what_cannot_be_measured_gets_a_sentence(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        measure_noise(run_from_dict(KEYS | keys), 1)
