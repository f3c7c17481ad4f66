"""The coordinate check: muP's changes are the same at two widths, the standard parametrization's are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.measure.coordinates import coordinates, of_width
from shardwise.run import UserError, run_from_dict

RUN = """[model]
layers = 1
hidden = 32
heads = 2
[train]
seq_len = 32
global_batch = 8
lr = 1e-3
schedule = "constant"
base_width = 32
device = "cpu"
"""


def test_widths_make_no_difference_with_mup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "run.toml", tmp_path / "coordinates.svg"
    path.write_text(RUN)
    command = ["scale", "coordinates", str(path), "--widths", "128,256", "--steps", "3", "--seeds", "1"]
    assert main([*command, "--train.parametrization=standard", "--json"]) == 1
    standard = json.loads(capsys.readouterr().out)
    main([*command, "--train.parametrization=mup", "--json", "--svg", str(picture), "--plot"])
    mup = json.loads(capsys.readouterr().out)
    assert picture.read_text().startswith("<svg")
    picture.unlink()
    assert set(mup["slopes"]) == {"embed", "layers.0.attention", "layers.0.ffn", "layers.0", "logits"}
    assert mup["worst"] < 0.12 < 0.3 < standard["worst"]
    main([*command[:3], "--widths", "32,64", "--steps", "1", "--seeds", "1", "--svg", str(picture)])
    assert "logits" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")
    assert main([*command[:3], "--widths", "32"]) == 2
    assert main([*command[:3], "--widths", "32,x"]) == 2
    assert "is not a list" in capsys.readouterr().err


def test_a_width_that_diverges_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    command = ["scale", "coordinates", str(path), "--widths", "32,64", "--steps", "2", "--seeds", "1", "--json"]
    assert main([*command, "--train.lr=1e20"]) == 2
    out, error = capsys.readouterr()
    assert (out, error) == (
        "",
        "error: train.lr: 1e+20 is too high: after 2 steps a network of width 32 has diverged\n",
    )


def test_a_wider_run_has_more_heads_of_the_same_size() -> None:
    run = run_from_dict(dict(model=dict(layers=1, hidden=64, heads=4, kv_heads=2, ffn=256)))
    wide = of_width(run, 256).model
    assert (wide.heads, wide.kv_heads, wide.head_dim, wide.ffn) == (16, 8, 16, 1024)
    with pytest.raises(UserError, match="no multiple"):
        of_width(run, 100)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(layout="auto", cluster=dict(chip="h100")), "layout: a coordinate check runs on one device"),
        (dict(layout=dict(replicate=2)), "layout: a coordinate check runs on one device"),
        (dict(objective=dict(kind="grpo", rewards=["a.py:b"], completion_tokens=4)), "objective.kind: grpo draws its own data"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_checked_get_a_sentence(keys: dict[str, Any], said: str) -> None:
    small = dict(model=dict(layers=1, hidden=32, heads=2), train=dict(seq_len=32, global_batch=8, device="cpu"))
    with pytest.raises(UserError, match=said):
        coordinates(run_from_dict(small | keys), [32, 64], 1)
