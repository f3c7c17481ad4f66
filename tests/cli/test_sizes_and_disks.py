"""Sizes beyond all reason and disks without room get a sentence, which names the key or the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.run import UserError, read_run
from shardwise.run.config import all_keys

HUGE, LARGEST = 10**9, 2**63 - 1


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([f"model.hidden={HUGE}"], "model.hidden"),
        ([f"model.hidden={LARGEST}"], "model.hidden"),
        ([f"model.ffn={LARGEST}"], "model.hidden"),
        ([f"model.vocab={LARGEST}"], "model.hidden"),
        ([f"model.head_dim={LARGEST - 1}"], "model.hidden"),
        (["model.experts=4", "model.experts_per_token=1", f"model.expert_ffn={LARGEST}"], "model.hidden"),
        ([f"train.global_batch={LARGEST}"], "train.global_batch"),
        ([f"train.seq_len={LARGEST}"], "train.global_batch"),
        ([f"model.layers={HUGE}"], "model.layers"),
        (["model.hidden=0"], "model.hidden"),
        (["model.heads=-1"], "model.heads"),
        (["model.vocab=0"], "model.vocab"),
        (["model.layers=-4"], "model.layers"),
        (["cluster.hbm_gbs=1e-300"], "cluster.hbm_gbs"),
        (["cluster.power_w=1e-300"], "cluster.power_w"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else None,
)
@pytest.mark.parametrize("layout", ["layout.shard=1", "layout=auto"])
def test_a_size_beyond_reason_is_refused(words: list[str], key: str, layout: str) -> None:
    with pytest.raises(UserError) as caught:
        read_run(None, ["cluster.chip=h100", layout, *words])
    assert key in {problem.key for problem in caught.value.problems}
    assert "e+" not in str(caught.value)


def test_no_number_of_a_run_makes_a_plan_infinite(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has neither infinity nor NaN, though Python writes both."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{name}={value}: {word}")

    model = ["--model.layers=2", "--model.experts=8", "--model.experts_per_token=2"]
    sections = ("model.expert", "layout.", "memory.", "cluster.")
    for name in (name for name, key in all_keys().items() if key.type is float and name.startswith(sections)):
        for value in ("1e308", "1e-308"):
            code = main(["plan", *model, "--cluster.chip=h100", "--layout.shard=8", "--json", f"--{name}={value}"])
            out, err = capsys.readouterr()
            assert (code == 2 and name in err) or json.loads(out, parse_constant=refuse), (name, value)


def test_training_such_a_network_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f"[model]\nhidden = {HUGE}\n")
    assert main(["train", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "model.hidden: 1,000,000,000 x 2,666,666,688 (model.ffn)" in capsys.readouterr().err


def test_every_published_size_is_within_reason() -> None:
    read_run(None, ["model.preset=deepseek-v3", "train.global_batch=15360", "train.seq_len=163840"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_full_disk_names_the_file(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster.chip=h100", "--train.microbatch=1", option, "/dev/full"]) == 2
    assert "/dev/full: " in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no such error there")
def test_storage_that_overflows_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def overflows(_: object) -> int:
        raise RuntimeError("Storage size calculation overflowed with sizes=[2666666688, 1000000000]")

    monkeypatch.setattr("shardwise.cli.main.run_command", overflows)
    assert main(["train"]) == 2
    assert "memory is full" in capsys.readouterr().err
