"""Fits find the law that points were made from, from every start, and leave out what does not belong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.cli.main import main
from shardwise.run.problems import UserError
from shardwise.scale.fit import fit, predict, warnings
from shardwise.scale.laws import LAWS
from shardwise.scale.minimize import minimize
from shardwise.scale.points import Points, make_points, read_csv
from shardwise.scale.store import coefficients

TRUE = dict(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)


def made(noise: float = 0.002, seed: int = 1) -> Points:
    """Runs of a known law, five sizes at five lengths."""
    random = np.random.default_rng(seed)
    params = np.repeat([1e8, 2e8, 4e8, 8e8, 1.6e9], 5)
    tokens = params * np.tile([5, 10, 20, 80, 320], 5)
    loss = TRUE["E"] + TRUE["A"] / params ** TRUE["alpha"] + TRUE["B"] / tokens ** TRUE["beta"]
    return make_points(params, tokens, loss * np.exp(noise * random.standard_normal(25)))


@pytest.mark.parametrize("name", list(LAWS))
def test_the_slopes_of_every_form_are_those_of_differences(name: str) -> None:
    law, random = LAWS[name], np.random.default_rng(0)
    theta = law.starts(4, 1.0, random)
    x, y = random.normal(size=7), random.normal(size=7)
    _, slopes = law.evaluate(theta, x, y)
    for at in range(law.size):
        step = np.zeros(law.size)
        step[at] = 1e-6
        difference = (law.evaluate(theta + step, x, y)[0] - law.evaluate(theta - step, x, y)[0]) / 2e-6
        assert slopes[at] == pytest.approx(difference, rel=1e-5, abs=1e-7)


def test_minimize_finds_the_valley_of_rosenbrock_from_every_start() -> None:
    def valley(at: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = at.T
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2, np.stack(
            [-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)], 1
        )

    found = minimize(valley, np.random.default_rng(0).uniform(-2, 2, (20, 2)))
    assert found.at == pytest.approx(np.ones((20, 2)), abs=1e-4)


@pytest.mark.drawn(group="laws")
def test_the_law_is_found_again_from_every_start() -> None:
    fitted = fit(made(noise=0.0), ("chinchilla",), starts=100, resampled=20)
    assert fitted.law.agree == 100
    found = coefficients(fitted, fitted.law)
    for name, value in TRUE.items():
        assert found[name]["value"] == pytest.approx(value, rel=1e-3)


@pytest.mark.drawn(group="laws")
def test_intervals_hold_the_truth_and_points_far_off_are_left_out() -> None:
    points = made()
    points.loss[3] *= 1.3
    fitted = fit(points, starts=10, resampled=60)
    assert fitted.left_out.names == ("point 4",)
    for params, ratio in ((8e9, 20), (1.6e9, 640)):
        true = TRUE["E"] + TRUE["A"] / params ** TRUE["alpha"] + TRUE["B"] / (params * ratio) ** TRUE["beta"]
        said = predict(fitted, params, params * ratio)
        assert said.low < true < said.high
        assert said.loss == pytest.approx(true, rel=0.01)
        assert said.high / said.low < 1.1
    assert any("5 times the parameters" in each for each in warnings(fitted, 8e9, 1.6e11))
    assert not warnings(fitted, 8e8, 1.6e10)


@pytest.mark.drawn(group="laws")
def test_points_without_noise_have_held_out_errors_of_zero() -> None:
    points = made(noise=0.0)
    fitted = fit(make_points(points.params, points.tokens, np.full(25, 2.5)), starts=5, resampled=10)
    assert predict(fitted, 1e9, 1e10).loss == pytest.approx(2.5)


@pytest.mark.parametrize("name", LAWS)
def test_coefficients_stay_within_the_range_of_a_float(name: str) -> None:
    """Those of few, noisy points may be beyond it."""
    found = LAWS[name].coefficients([300.0] * LAWS[name].size, 20.0, 23.0)
    assert all(np.isfinite(value) for value in found.values())


def test_few_points_are_refused() -> None:
    points = made()
    with pytest.raises(UserError, match="too few"):
        fit(points.chosen(np.arange(25) < 4))
    with pytest.raises(UserError, match="same params"):
        fit(points.chosen(points.params == 1e8).chosen(np.ones(5, bool)), ("kaplan",))
    # In the order of the forms, in every process.
    with pytest.raises(UserError, match=r"chinchilla needs 4 sizes(.|\n)*over-training needs 3 sizes"):
        fit(points.chosen(points.params < 3e8))


def csv_of(folder: Path, points: Points) -> Path:
    lines = ["name,dataset,params,flops,loss"]
    for name, params, flops, loss in zip(points.names, points.params, points.flops, points.loss, strict=True):
        lines.append(f"{name},made,{params},{flops},{loss}")
    path = folder / "runs.csv"
    path.write_text("\n".join([*lines, "other,else,1e9,1e20,9.9"]) + "\n")
    return path


@pytest.mark.drawn(group="laws")
def test_fit_and_predict_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = csv_of(tmp_path, made()), tmp_path / "fit.json"
    fast = ("--starts", "5", "--resampled", "20")
    assert main(["scale", "fit", str(path), "--loss", "loss", "--where", "dataset=made", "--out", str(out), *fast]) == 0
    assert "alpha" in capsys.readouterr().out
    assert main(["scale", "predict", str(out), "--params", "8e9", "--tokens", "1.6e11", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["low"] < found["loss"] < found["high"]
    true = TRUE["E"] + TRUE["A"] / 8e9 ** TRUE["alpha"] + TRUE["B"] / 1.6e11 ** TRUE["beta"]
    assert found["loss"] == pytest.approx(true, rel=0.01)
    assert found["warnings"]
    assert main(["scale", "predict", str(out), "--params", "8e9", "--tokens", "1.6e11"]) == 0
    assert "beyond the runs: 5 times the parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("params,tokens,loss\n1,2,3\n", ["--loss", "los"], 'has no column "los"; did you mean loss?'),
        ("params,loss\n1,2\n", ["--loss", "loss"], "neither a column tokens nor a column flops"),
        ("params,tokens,loss\n1,2,nan\n1,-2,3\n", ["--loss", "loss"], 'line 2: loss is "nan", not a number above 0'),
        ("params,tokens,loss,set\n1,2,3,a\n", ["--loss", "loss", "--where", "set=b"], "no row has set = b; set is a"),
        ("params,tokens,loss\n1,2,3\n", ["--loss", "loss", "--where", "set"], '"set" is not COLUMN=VALUE'),
        ("params,tokens,loss\n", ["--loss", "loss"], "has no rows"),
        ("", ["--loss", "loss"], 'has no column "params"'),
        ("\x00", ["--loss", "loss"], "no column"),
    ],
)
def test_bad_files_get_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, arguments: list[str], message: str
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    assert main(["scale", "fit", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "fit", str(tmp_path / "runs.csv")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'runs.csv'}: there is no such file or folder\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 9}', '{"version": 1, "middle": [0]}', "\x00"])
def test_a_file_that_is_no_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    assert main(["scale", "predict", str(path), "--params", "1e9", "--tokens", "1e10"]) == 2
    assert "error:" in capsys.readouterr().err


def test_rows_are_read_with_their_names(tmp_path: Path) -> None:
    points = read_csv(csv_of(tmp_path, made()), "loss", {"dataset": "made"})
    assert len(points) == 25
    assert points.names[0] == "point 1"
    assert points.tokens == pytest.approx(made().tokens)
