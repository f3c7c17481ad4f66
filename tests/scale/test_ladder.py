"""Ladders: rungs of the target's kind within the budget; run folders as points; repeated data; the three approaches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.cli.main import main
from shardwise.plan.budget.ladder import make_ladder, rung_of
from shardwise.plan.cost.flops import parameters
from shardwise.run import UserError, read_run, run_from_dict, to_toml
from shardwise.scale import fit as module
from shardwise.scale.approaches import approaches, lowest_point
from shardwise.scale.fit import fit
from shardwise.scale.laws import LAWS as FORMS
from shardwise.scale.points import make_points
from shardwise.scale.published import LAWS
from shardwise.scale.repeat import PUBLISHED, Repeats, effective, fit_repeats
from shardwise.scale.runs import count, read_runs

TARGET = dict(
    name="target", model=dict(layers=6, hidden=128, heads=8, kv_heads=2, vocab=257, tied_embeddings=True),
    train=dict(steps=2000, global_batch=32, seq_len=128, lr=4e-3, warmup=100),
)  # fmt: skip


@pytest.mark.parametrize("keys", [{}, dict(experts=4, experts_per_token=2, expert_ffn=128)])
def test_rungs_are_smaller_kin_within_the_budget(keys: dict[str, int]) -> None:
    target = run_from_dict(TARGET | dict(model=dict(TARGET["model"]) | keys))  # type: ignore[call-overload]
    goal = rung_of(target)
    rungs = make_ladder(target, 0.2 * goal.flops)
    assert len(rungs) == 5
    assert [rung.params for rung in rungs] == sorted(rung.params for rung in rungs)
    assert rungs[-1].params <= goal.params / 3
    assert sum(rung.flops for rung in rungs) < 0.3 * goal.flops
    for rung in rungs:
        model, train = rung.run.model, rung.run.train
        assert rung.tokens / rung.params == pytest.approx(goal.tokens / goal.params, rel=0.05)
        assert (model.head_dim, model.heads % model.kv_heads) == (16, 0)
        assert train.lr > target.train.lr  # smaller models learn faster
        assert train.global_batch < target.train.global_batch
        assert count(rung.run) == rung.params == parameters(model).total
    same = make_ladder(
        run_from_dict(TARGET | dict(train=dict(TARGET["train"]) | dict(parametrization="mup"))), 0.2 * goal.flops
    )  # type: ignore[call-overload]
    assert {rung.run.train.lr for rung in same} == {4e-3}


def test_shallow_models_keep_their_layers_where_they_have_enough_widths() -> None:
    target = run_from_dict(dict(TARGET) | dict(model=dict(TARGET["model"]) | dict(heads=16, kv_heads=16)))  # type: ignore[call-overload]
    goal = rung_of(target)
    rungs = make_ladder(target, 0.3 * goal.flops)
    assert len(rungs) == 5
    assert {rung.run.model.layers for rung in rungs} == {6}
    assert len({rung.run.model.hidden for rung in rungs}) == 5


def test_the_array_asks_for_the_machines_of_the_target(tmp_path: Path) -> None:
    """Without them Slurm would start all ranks without a GPU, on machines of its choice."""
    machines = dict(layout=dict(shard=8), cluster=dict(chip="h100", nodes=2, devices_per_node=4))
    path = tmp_path / "target.toml"
    path.write_text(to_toml(run_from_dict(TARGET | machines)))
    assert main(["scale", "ladder", str(path), "--out", str(tmp_path / "ladder"), "--slurm"]) == 0
    lines = (tmp_path / "ladder" / "ladder.sbatch").read_text().splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH --n") or "--gpus" in line]
    assert asked == ["--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"]


@pytest.mark.drawn(group="laws")
def test_a_ladder_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "target.toml"
    path.write_text(to_toml(run_from_dict(TARGET)))
    out = tmp_path / "ladder"
    command = ["scale", "ladder", str(path), "--out", str(out), "--json"]
    assert main([*command, "--slurm"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "prediction" not in found
    assert f"--array=0-{len(found['rungs']) - 1}" in (out / "ladder.sbatch").read_text()
    for rung in found["rungs"]:  # what training would leave, of a known law
        run = read_run(rung["file"])
        folder = out / rung["name"]
        folder.mkdir()
        (folder / "run.toml").write_text(to_toml(run))
        record = dict(step=run.train.steps, eval_loss=1.5 + 60 * count(run) ** -0.4)
        (folder / "metrics.jsonl").write_text(json.dumps(dict(step=1, loss=5.5)) + "\n" + json.dumps(record) + "\n")
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    want = 1.5 + 60 * found["target"]["params"] ** -0.4
    assert found["prediction"]["loss"] == pytest.approx(want, rel=8e-3)  # published exponents pull at that of the law
    assert main(["scale", "fit", *(str(out / rung["name"]) for rung in found["rungs"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["form"] == "power"
    (out / found["rungs"][0]["name"] / "metrics.jsonl").write_text(json.dumps(dict(step=3, eval_loss=5.0)) + "\n")
    assert main(["scale", "fit", *(str(out / rung["name"]) for rung in found["rungs"])]) == 2
    assert "ended at step 3" in capsys.readouterr().err
    assert main(["scale", "ladder", str(path), "--budget", "1e-6", "--out", str(out)]) == 2
    assert "give more" in capsys.readouterr().err


def test_published_exponents_help_where_few_runs_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve ladders of five runs whose losses scatter by 0.5%, with exponents about the published ones, not equal to them."""
    params, target = 1e5 * 1.5 ** np.arange(5), 1e5 * 1.5**4 * 3
    errors: dict[float, list[float]] = {}
    for spread in (module.SPREAD, 1e6):
        monkeypatch.setattr(module, "SPREAD", spread)
        random = np.random.default_rng(3)
        for exponent in np.linspace(0.25, 0.4, 12):
            scale = 1e5**exponent
            losses = (0.5 + scale * params**-exponent) * np.exp(random.normal(0, 0.005, 5))
            fitted = fit(make_points(params, 20 * params, losses), forms=("power",), starts=8, resampled=0)
            at = [np.log([value]) - middle for value, middle in ((target, fitted.x0), (20 * target, fitted.y0))]
            found = float(np.exp(FORMS["power"].evaluate(fitted.law.theta[None], *at, slope=False)[0][0, 0]))
            errors.setdefault(spread, []).append(found / (0.5 + scale * target**-exponent) - 1)
    with_prior, without = (float(np.sqrt(np.mean(np.square(each)))) for each in errors.values())
    assert with_prior < 0.8 * without


@pytest.mark.parametrize("value", ["nan", "inf", 0.0])
def test_a_run_that_diverged_is_named(tmp_path: Path, value: str | float) -> None:
    run = run_from_dict(TARGET)
    for name, loss in (("fine", 4.0), ("diverged", value)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.toml").write_text(to_toml(run))
        (folder / "metrics.jsonl").write_text(json.dumps(dict(step=run.train.steps, eval_loss=loss)) + "\n")
    assert read_runs([tmp_path / "fine"]).loss.tolist() == [4.0]
    with pytest.raises(UserError, match=f"diverged: ended with eval_loss {value}"):
        read_runs([tmp_path / "fine", tmp_path / "diverged"])


@pytest.mark.drawn(group="laws")
def test_the_three_approaches_find_the_exponent() -> None:
    law = LAWS["besiroglu2024"]
    flops = np.repeat(10.0 ** np.arange(18, 23), 15)
    params = np.sqrt(flops / 120) * np.tile(np.geomspace(0.1, 10, 15), 5)
    tokens = flops / (6 * params)
    found = approaches(fit(make_points(params, tokens, law.loss(params, tokens)), ("chinchilla",), 10, 20))
    want = law.beta / (law.alpha + law.beta)
    assert set(found) == {"envelope", "isoflop", "law"}
    assert found["law"].value == pytest.approx(want, abs=1e-3)
    assert found["isoflop"].value == pytest.approx(want, abs=0.02)
    assert found["envelope"].value == pytest.approx(want, abs=0.04)


def test_the_lowest_point_of_runs_of_equal_compute() -> None:
    x = np.arange(9.0)
    for lowest in (2.3, 4.0, 6.85):  # a parabola on an even grid is met exactly
        assert lowest_point(x, 0.3 * (x - lowest) ** 2 + 1) == pytest.approx(lowest, abs=0.003)
    # Sizes far from the lowest, on one side alone, do not draw it to them as they draw a parabola.
    steep = np.where(x < 3, (3 - x) ** 3, 0.2 * (x - 3) ** 2) + 1
    bend, slope, _ = np.polyfit(x, steep, 2)
    assert lowest_point(x, steep) == pytest.approx(3, abs=0.3) != pytest.approx(-slope / (2 * bend), abs=1.5)


@pytest.mark.drawn(group="laws")
def test_the_worth_of_repeated_data_is_found_again() -> None:
    law = LAWS["muennighoff2023"]
    params = np.repeat([1e8, 3e8, 1e9, 3e9], 4)
    tokens = params * np.tile([10.0, 20, 40, 80], 4)
    fresh = make_points(params, tokens, law.loss(params, tokens))
    base = fit(fresh, ("chinchilla",), 10, 20)
    again = tokens * 8
    worth = effective(base, params, again, tokens, Repeats())
    seen, losses = np.concatenate([tokens, again]), np.concatenate([fresh.loss, law.loss(*worth)])
    both = make_points(np.tile(params, 2), seen, losses, unique=np.tile(tokens, 2))
    _, repeats = fit_repeats(both)
    assert (repeats.data, repeats.params) == pytest.approx(PUBLISHED, rel=0.25)
    # One pass is worth itself; no number of passes is worth more than 1 + R_D of them.
    n, d = effective(base, np.array([1e9]), np.array([2e10]), np.array([2e10]), Repeats())
    assert (n[0], d[0]) == (1e9, 2e10)
    _, d = effective(base, np.array([1e9]), np.array([2e15]), np.array([2e10]), Repeats())
    assert d[0] == pytest.approx(2e10 * (1 + PUBLISHED[0]))
