"""`shardwise plan --pick`: a row of the ranking is a run that plans with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.run import run_from_dict

SEARCH = [
    "plan",
    "--layout=auto",
    "--cluster.chip=h100",
    "--cluster.nodes=2",
    "--train.dtype=bfloat16",
    "--train.global_batch=64",
]
MODELS = [
    ["--model.preset=llama3-8b", "--train.seq_len=4096"],
    ["--model.experts=8", "--model.experts_per_token=2", "--train.seq_len=2048"],
]


@pytest.mark.parametrize(
    ("model", "number"), list(zip(MODELS, (1, 12), strict=True)), ids=lambda words: str(words)[:20]
)
@pytest.mark.drawn(group="searches")
def test_a_row_is_a_run_with_the_same_numbers(
    model: list[str], number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SEARCH, *model, "--json"]) == 0
    ranking = json.loads(capsys.readouterr().out)["ranking"]
    assert len(ranking) == 12
    row, file = ranking[number - 1], tmp_path / f"row{number}.toml"
    assert main([*SEARCH, *model, "--pick", str(number), "--out", str(file)]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert f"wrote {file}" in told.err
    assert main(["plan", str(file), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    for key in ("layout", "devices", "step_seconds", "mfu", "cost", "memory", "breakdown", "binds"):
        assert planned[key] == row[key], key
    assert run_from_dict(row["run"]) == run_from_dict(planned["run"])


def test_a_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, *MODELS[0], "--pick", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# row 3 of the layouts for these keys: ")
    assert "[layout]" in text
    assert "auto = false" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pick=99", "--keep=5"], "--pick: there is no row 99: the ranking has 5; --keep asks for more"),
        (["--pick=0"], "not a whole number of 1 or more"),
        (["--pick=two"], "not a whole number of 1 or more"),
        (["--pick=1", "--layout.auto=false", "--layout.shard=16"], "--pick: is for a search"),
        (["--out=x.toml"], "--out: is the file of --pick"),
    ],
    ids=str,
)
def test_a_bad_number_gets_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, *MODELS[0], *words]) == 2
    assert said in capsys.readouterr().err
