"""`shardwise config --chips` and `--presets`: everything that a run may name, for people and for programs."""

from __future__ import annotations

import json

import pytest

from shardwise.cli.main import main
from shardwise.hardware import CHIPS
from shardwise.run import PRESETS


def test_every_chip_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--chips"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line.split() for line in lines if line.split() and ": " not in line}
    assert set(CHIPS) <= set(named)
    assert max(map(len, lines)) <= 80
    assert named["h100-sxm"][1:9] == ["989", "1,979", "80", "3,350", "450", "50", "8", "2.99"]
    assert main(["config", "--chips", "--json"]) == 0
    chips = {chip["name"]: chip for chip in json.loads(capsys.readouterr().out)}
    assert set(chips) == set(CHIPS)
    assert chips["a100-sxm-80g"]["peak"]["bfloat16"] == 312e12
    assert "a100" in chips["a100-sxm-80g"]["aliases"]


def test_every_preset_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line.split() for line in lines if line.split() and ": " not in line}
    assert set(PRESETS) <= set(named)
    assert max(map(len, lines)) <= 80
    assert named["llama3-405b"][1:] == ["406", "B", "126", "16384", "128", "8192", "16.8", "M"]
    assert main(["config", "--presets", "--json"]) == 0
    presets = {preset["name"]: preset for preset in json.loads(capsys.readouterr().out)}
    assert list(presets) == list(PRESETS)
    assert presets["llama3-8b"]["parameters"] == 8_030_261_248
    assert presets["mixtral-8x7b"]["active_parameters"] < presets["mixtral-8x7b"]["parameters"]


@pytest.mark.parametrize(
    ("key", "option"),
    [("cluster.chip=abacus", "--chips"), ("model.preset=abacus", "--presets"), ("cluster.chip=h10", "--chips")],
)
def test_an_unknown_name_is_told_where_the_known_ones_are(
    key: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--{key}"]) == 2
    assert f"`shardwise config {option}` lists them" in capsys.readouterr().err


def test_one_list_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--chips", "--presets"]) == 2
    assert "not allowed with" in capsys.readouterr().err
