"""A measured profile: read with clear mistakes, exact at its points, close between them, silent where it says nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwise.hardware import (
    CHIPS,
    attention_seconds,
    collective_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    load_profile,
    make_cluster,
    memory_seconds,
)
from shardwise.hardware.profile import VERSION, dump_profile
from shardwise.plan.cost.job import cluster_of
from shardwise.run import UserError, run_from_dict

A100 = CHIPS["a100-sxm-80g"]
CONTENT = {
    "machine": "a test",
    "gemm": [
        {"m": 1024, "n": 1024, "k": 1024, "dtype": "bfloat16", "seconds": 5e-5},
        {"m": 8192, "n": 8192, "k": 8192, "dtype": "bfloat16", "seconds": 9e-3},
    ],
    "memory": [{"bytes": 1_000_000_000, "seconds": 1.5e-3}],
    "collective": [{"operation": "all_reduce", "size": 4, "bytes": 2**24, "seconds": 1e-3}],
    "attention": [
        {
            "batch": 2,
            "heads": 16,
            "queries": 2048,
            "keys": 2048,
            "head_dim": 128,
            "causal": True,
            "kernel": "flash2",
            "direction": "forward",
            "dtype": "bfloat16",
            "seconds": 1e-3,
        }
    ],
}


def write(folder: Path, content: object) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return path


def test_a_profile_is_exact_where_it_was_measured(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, CONTENT))
    chip = replace(A100, profile=profile)
    assert gemm_seconds(chip, 1024, 1024, 1024) == pytest.approx(5e-5, rel=1e-3)
    assert gemm_seconds(chip, 8192, 8192, 8192) == pytest.approx(9e-3, rel=1e-3)
    assert memory_seconds(chip, 1e9) == pytest.approx(1.5e-3, rel=1e-3)
    assert attention_seconds(chip, 2, 16, 2048, 2048, 128) == pytest.approx(1e-3, rel=1e-3)
    cluster = make_cluster("a100", 2, profile=profile)
    assert collective_seconds(cluster, "all_reduce", 2**24, 4) == pytest.approx(1e-3, rel=1e-3)


def test_between_points_the_factor_is_between_theirs(tmp_path: Path) -> None:
    chip = replace(A100, profile=load_profile(write(tmp_path, CONTENT)))
    sizes = 2.0 ** np.arange(6, 15)
    factor = gemm_seconds(chip, sizes, sizes, sizes) / gemm_seconds(A100, sizes, sizes, sizes)
    ends = [gemm_seconds(chip, n, n, n) / gemm_seconds(A100, n, n, n) for n in (1024, 8192)]
    assert (factor >= min(ends) - 1e-9).all()
    assert (factor <= max(ends) + 1e-9).all()
    np.testing.assert_allclose(gemm_seconds(chip, 100, 100, 100), gemm_seconds(chip, np.array([100]), 100, 100)[0])


def test_what_was_not_measured_stays_the_catalogues(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, CONTENT))
    chip = replace(A100, profile=profile)
    assert gemm_seconds(chip, 1024, 1024, 1024, "float32") == gemm_seconds(A100, 1024, 1024, 1024, "float32")
    shape = (2, 16, 2048, 2048, 128)
    assert attention_seconds(chip, *shape, direction="backward") == attention_seconds(
        A100, *shape, direction="backward"
    )
    plain, measured = make_cluster("a100", 2), make_cluster("a100", 2, profile=profile)
    assert collective_seconds(measured, "all_gather", 1e8, 4) == collective_seconds(plain, "all_gather", 1e8, 4)
    # Measured inside a machine: says nothing about the network.
    assert collective_seconds(measured, "all_reduce", 1e8, 2, 8) == collective_seconds(plain, "all_reduce", 1e8, 2, 8)


def test_mistakes_in_a_profile_are_named_together(tmp_path: Path) -> None:
    wrong = {
        "gem": [],
        "memory": [{"bytes": 0, "seconds": "fast"}, 3],
        "collective": [{"size": 2, "bytes": 8, "seconds": 1}],
    }
    with pytest.raises(UserError) as caught:
        load_profile(write(tmp_path, wrong))
    text = str(caught.value)
    assert "gem: unknown key; did you mean gemm?" in text
    assert "memory[0].bytes: has to be a number above 0" in text
    assert "memory[0].seconds: has to be a number above 0" in text
    assert "memory[1]: has to be an object" in text
    assert "collective[0].operation: is missing" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (f'{{"launch": {"9" * 5000}}}', "is not JSON"),
        ("[]", "has to be one JSON object"),
        ("{}", "holds no measurements"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_profile(path)


def test_a_profile_of_another_chip_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"chip": "cpu", "memory": [{"bytes": 8, "seconds": 1}]})
    for chip, refused in (("cpu", False), ("h100", True)):
        run = run_from_dict(dict(cluster=dict(chip=chip, profile=str(path))))
        if refused:
            with pytest.raises(UserError, match=r"measured on cpu, and cluster\.chip is h100-sxm"):
                cluster_of(run)
        else:
            assert cluster_of(run).chip.profile is not None


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such profile"):
        load_profile(tmp_path / "none.json")


def test_a_profile_of_another_version_is_refused(tmp_path: Path) -> None:
    assert load_profile(write(tmp_path, CONTENT | {"version": VERSION})).machine == "a test"
    with pytest.raises(UserError, match=r"version: is 1, but .* reads 2"):
        load_profile(write(tmp_path, CONTENT | {"version": 1}))


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = replace(load_profile(write(tmp_path, CONTENT)), launch=1e-5, chip="cpu", threads=2)
    assert load_profile(write(tmp_path, dump_profile(profile))) == profile


def test_measured_products_of_experts_come_before_those_of_one(tmp_path: Path) -> None:
    point = {"tokens": 4096, "n": 1024, "k": 1024, "experts": 8, "dtype": "bfloat16", "seconds": 3e-4}
    chip = replace(A100, profile=load_profile(write(tmp_path, CONTENT | {"grouped": [point]})))
    assert grouped_gemm_seconds(chip, 4096, 1024, 1024, 8) == pytest.approx(3e-4, rel=1e-3)
    without = replace(A100, profile=load_profile(write(tmp_path, CONTENT)))
    assert grouped_gemm_seconds(without, 4096, 1024, 1024, 8) != pytest.approx(3e-4, rel=1e-3)


def test_numbers_and_names_of_a_profile_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_profile(write(tmp_path, {"launch": -1, "overhead": "much", "chip": 3}))
    text = str(caught.value)
    for key in ("launch: has to be a number", "overhead: has to be a number", "chip: has to be a text"):
        assert key in text


def test_a_measured_operation_comes_before_a_copy(tmp_path: Path) -> None:
    point = {"operation": "norm", "direction": "forward", "dtype": "float32", "bytes": 10**9, "seconds": 5e-3}
    chip = replace(A100, profile=load_profile(write(tmp_path, CONTENT | {"elementwise": [point]})))
    assert memory_seconds(chip, 1e9, ("norm", "forward", "float32")) == pytest.approx(5e-3, rel=1e-3)
    for other in (("norm", "backward", "float32"), ("loss", "forward", "float32"), ("norm", "forward", "bfloat16")):
        assert memory_seconds(chip, 1e9, other) == memory_seconds(chip, 1e9)
