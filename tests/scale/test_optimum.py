"""The best size against the closed form, what another size costs, shapes of a wanted size, and budgets on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.cli.main import main
from shardwise.plan.cost.flops import parameters
from shardwise.run import read_run, run_from_dict
from shardwise.scale.optimum import best_size, cheapest, deviations, tokens_for
from shardwise.scale.published import LAWS, MODELS, step_law
from shardwise.scale.shapes import count, shape_of

LAW = LAWS["besiroglu2024"]


@pytest.mark.parametrize("flops", [1e18, 5.76e23, 1e26])
def test_the_best_size_is_that_of_the_closed_form(flops: float) -> None:
    """Hoffmann et al. 2022, eq. 4."""
    scale = (LAW.alpha * LAW.A / (LAW.beta * LAW.B)) ** (1 / (LAW.alpha + LAW.beta))
    best = best_size(LAW.loss, flops)
    assert best.params == pytest.approx(scale * (flops / 6) ** (LAW.beta / (LAW.alpha + LAW.beta)), rel=1e-4)
    assert best.flops == pytest.approx(flops)
    assert best.loss == pytest.approx(float(LAW.loss(np.array([best.params]), np.array([best.tokens]))[0]))


def test_chinchilla_was_near_its_own_optimum_and_gpt3_was_not() -> None:
    shares = {}
    for model in MODELS:
        loss = float(LAW.loss(np.array([model.params]), np.array([model.tokens]))[0])
        same = cheapest(LAW.loss, loss)
        assert same is not None
        shares[model.name] = same.flops / (6 * model.params * model.tokens)
    assert all(share <= 1 + 1e-6 for share in shares.values())
    assert shares["Chinchilla"] > 0.99
    assert shares["GPT-3"] < 0.7


def test_other_sizes_reach_the_same_loss_with_more_compute() -> None:
    best = best_size(LAW.loss, 1e22)
    found = deviations(LAW.loss, best, (0.5, 1.0, 2.0, 1e-3))
    assert found[1][2] == pytest.approx(1.0, rel=1e-4)
    assert found[0][2] > 1.05
    assert found[2][2] > 1.05
    assert found[3][1] == np.inf
    size = np.array([best.params / 2])
    assert LAW.loss(size, tokens_for(LAW.loss, size, best.loss)) == pytest.approx(best.loss)


def test_a_model_that_is_used_is_smaller_and_trained_longer() -> None:
    alone = cheapest(LAW.loss, 2.2)
    used = cheapest(LAW.loss, 2.2, served=1e13)
    assert alone is not None
    assert used is not None
    assert used.params < 0.7 * alone.params
    assert used.flops > alone.flops
    assert 6 * used.params * used.tokens + 2 * used.params * 1e13 < alone.flops + 2 * alone.params * 1e13
    assert cheapest(LAW.loss, 1.5) is None


@pytest.mark.parametrize("params", [3e7, 4e8, 8e9, 7e10, 4e11])
def test_a_shape_has_the_wanted_size(params: float) -> None:
    keys = shape_of(params, 32000)
    run = run_from_dict(dict(model=keys))
    assert parameters(run.model).total == count(keys)
    assert count(keys) == pytest.approx(params, rel=0.1)


def test_step_law_at_a_published_size() -> None:
    """Li et al. 2025: 1 B parameters on 100 B tokens are near a rate of 1e-3 and a batch of 1 M tokens."""
    rate, batch = step_law(1e9, 1e11)
    assert 1e-3 < rate < 3e-3
    assert 0.9e6 < batch < 1.3e6


@pytest.mark.drawn(group="searches")
def test_budget_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    assert main(["budget", "--gpu-hours", "500", "--chip", "h100", "--json", "--out", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"params", "tokens", "loss", "layout", "days", "cost"} <= set(found)
    assert found["gpu_hours"] == pytest.approx(500, rel=0.02)
    assert found["cost"] == pytest.approx(found["gpu_hours"] * 2.99, rel=1e-6)
    assert found["days"] <= 30
    assert found["loss"] == min(each["loss"] for each in found["planned"])
    assert 5 < found["tokens_per_param"] < 60
    run = read_run(path)
    assert parameters(run.model).total == found["params"]
    assert run.train.steps * run.batch_tokens == pytest.approx(found["tokens"], rel=0.01)
    assert main(["budget", "--published"]) == 0
    assert "Chinchilla" in capsys.readouterr().out


@pytest.mark.drawn(group="searches")
def test_a_budget_on_a_chip_without_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert main(["budget", "--flops", "1e18", "--chip", "v100", "--devices", "1", "--out", str(path)]) == 0
    assert read_run(path).train.dtype == "float16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a budget"),
        (["--days", "3"], "give a budget"),
        (["--flops", "1e20", "--law", "besiroglu"], "did you mean besiroglu2024?"),
        (["--flops", "1e20", "--law", "missing.json"], "cannot be read"),
        (["--flops", "1e20", "--chip", "h1000"], "h1000"),
        (["--dollars", "-3"], "number of 0.01 to 1e+15"),
        (["--gpu-hours", "1e300"], "number of 0.001 to 1e+12"),
        (["--flops", "1e300"], "number of 1e+09 to 1e+36"),
        (["--days", "1e300", "--devices", "8"], "number of 0.01 to 1e+06"),
        (["--flops", "1e20", "--chip", "h100", "--devices", "12"], "--devices: 12 devices are not whole machines of 8"),
        (["--flops", "1e18", "--chip", "h100", "--serve-tokens", "1e15"], "too small to train any model and serve it"),
    ],
)
def test_bad_budgets_get_a_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", *arguments]) == 2
    assert message in capsys.readouterr().err
