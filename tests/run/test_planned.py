"""A plan of a preset is of the model as it was pretrained, and says so; training keeps its small defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.run import PRESETS, UserError, read_planned, read_run
from shardwise.run.presets import pretraining


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_batch_of_millions_of_tokens_that_its_positions_hold(preset: str) -> None:
    keys = pretraining(preset)
    assert keys["dtype"] == "bfloat16"
    assert 0.5e6 <= keys["seq_len"] * keys["global_batch"] <= 64e6
    assert keys["seq_len"] <= PRESETS[preset]["max_positions"]


def test_what_a_run_leaves_open_is_the_presets_in_a_plan_alone() -> None:
    words = ["model.preset=llama3-405b", "cluster.chip=h100", "layout=auto"]
    run, left, source = read_planned(None, words)
    assert (run.train.dtype, run.train.seq_len, run.train.global_batch) == ("bfloat16", 8192, 2048)
    assert left == {"train.dtype": "bfloat16", "train.seq_len": 8192, "train.global_batch": 2048}
    assert "preset llama3-405b" in source
    trained = read_run(None, words).train
    assert (trained.dtype, trained.seq_len, trained.global_batch) == ("float32", 512, 32)


def test_what_a_user_sets_leaves_the_rest_to_the_preset() -> None:
    """Also with one key set: a longer sequence leaves the tokens of a batch as published, and no key falls back to 512 tokens."""
    planned = read_planned(None, ["model.preset=llama3-405b", "train.seq_len=131072", "cluster.chip=h100"])
    assert (planned.run.train.dtype, planned.run.train.global_batch) == ("bfloat16", 128)
    assert list(planned.left_open) == ["train.dtype", "train.global_batch", "train.microbatch"]
    planned = read_planned(None, ["model.preset=llama3-8b", "train.dtype=bfloat16", "layout.shard=8"])
    assert (planned.run.train.seq_len, planned.run.train.microbatch) == (8192, 1)
    assert "taken from the preset llama3-8b: train.seq_len = 8192" in planned.sentence()
    own = read_planned(None, ["model.preset=llama3-8b", "train.seq_len=512", "train.global_batch=8"])
    assert (own.run.train.dtype, own.run.train.microbatch) == ("bfloat16", 8)


@pytest.mark.parametrize("length", ["4096", "4_096", "4.096e3"])
def test_a_batch_is_kept_in_tokens_however_the_length_is_written(length: str) -> None:
    words = ["model.preset=llama3-70b", "cluster.chip=h100"]
    published = read_planned(None, words).run.train
    train = read_planned(None, [*words, f"train.seq_len={length}"]).run.train
    assert train.seq_len == 4096
    assert train.seq_len * train.global_batch == published.seq_len * published.global_batch


@pytest.mark.parametrize("length", ["many", "0", "-1", "9" * 5000])
def test_a_length_that_is_none_is_the_only_mistake(length: str) -> None:
    with pytest.raises(UserError) as caught:
        read_planned(None, ["model.preset=llama3-70b", f"train.seq_len={length}"])
    assert [problem.key for problem in caught.value.problems] == ["train.seq_len"]


def test_a_model_of_ones_own_keeps_the_defaults() -> None:
    planned = read_planned(None, ["model.layers=2", "train.seq_len=4096"])
    assert (planned.run.train.dtype, planned.run.train.global_batch) == ("float32", 32)
    assert planned.sentence() == "not set in the run, defaults: train.dtype = float32, train.global_batch = 32"
    complete = ["train.seq_len=4096", "train.dtype=bfloat16", "train.global_batch=8"]
    assert read_planned(None, complete).sentence() == ""
    assert read_planned(None, []).run == read_run(None, [])


def test_a_given_layout_has_microbatches_of_one() -> None:
    planned = read_planned(None, ["model.preset=llama2-7b", "layout.shard=8"])
    assert planned.run.train.microbatch == 1
    assert "train.microbatch = 1" in planned.sentence()
    assert (
        read_planned(None, ["model.preset=llama2-7b", "layout.shard=8", "train.microbatch=2"]).run.train.microbatch == 2
    )


def test_the_plan_says_what_it_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.preset=llama2-7b", "--layout.shard=8", "--cluster.chip=h100"]
    page = tmp_path / "plan.html"
    main(["plan", *words, "--html", str(page)])
    said = " ".join(capsys.readouterr().out.split())
    line = "not set in the run, taken from the preset llama2-7b: train.dtype = bfloat16, train.seq_len = 4096"
    assert line in said
    assert line in page.read_text()
    main(["plan", *words, "--json"])
    assert json.loads(capsys.readouterr().out)["not_set"]["train.seq_len"] == 4096
    main(["plan", *words, "--json", "--train.seq_len=512", "--train.dtype=bfloat16", "--train.global_batch=8"])
    assert json.loads(capsys.readouterr().out)["not_set"] == {}
    main(["config", *words, "--planned", "--json"])
    assert json.loads(capsys.readouterr().out)["train"]["seq_len"] == 4096
    main(["config", *words, "--json"])
    assert json.loads(capsys.readouterr().out)["train"]["seq_len"] == 512
