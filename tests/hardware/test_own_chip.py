"""A chip of the user's own, in a file with the catalogue's keys: read, planned with the curves of another, mistakes told."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.hardware import CHIPS, collective_seconds, find_chip, gemm_seconds, make_cluster
from shardwise.hardware.efficiency import constants
from shardwise.run import UserError, read_run

OWN = """
tflops = { float32 = 40, half = 500, fp8 = 1000 }
memory_gib = 64
hbm_gbs = 2500
intra_gbs = 200
inter_gbs = 25
"""


def written(folder: Path, text: str, name: str = "my-chip.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_values_are_what_the_makers_state() -> None:
    assert CHIPS["gb300"].memory == 288 * 10**9
    assert CHIPS["h200-sxm"].memory == 141 * 2**30
    assert CHIPS["tpu-v4"].peak["float32"] == 275 / 6 * 1e12
    assert CHIPS["mi355x"].intra == 537.6e9
    assert CHIPS["h800-sxm"].peak == CHIPS["h100-sxm"].peak | {"float64": 1e12}
    assert "int8" not in CHIPS["b300"].peak  # a table of speeds replaces that of `like`
    assert CHIPS["tpu-v5p"].fabric == "torus"
    assert CHIPS["tpu-v5p"].driver_names == ()


def test_a_file_with_the_needed_keys_is_a_chip(tmp_path: Path) -> None:
    chip = find_chip(written(tmp_path, OWN))
    assert (chip.name, chip.memory, chip.hbm, chip.intra, chip.inter) == ("my-chip", 64 * 2**30, 2.5e12, 200e9, 25e9)
    assert chip.peak == {"float32": 40e12, "float16": 500e12, "bfloat16": 500e12, "fp8": 1000e12}
    assert (chip.devices_per_node, chip.domain, chip.price) == (8, 8, 0)
    near = CHIPS[chip.lender]
    assert near.name in ("a100-sxm-80g", "a800-sxm-80g", "h100-pcie")
    assert constants("gemm", chip) == constants("gemm", near)
    assert chip.generation == "my-chip"  # no published run was fitted to it


def test_like_brings_the_rest(tmp_path: Path) -> None:
    chip = find_chip(written(tmp_path, '[h100-96g]\nlike = "H100"\nmemory_gib = 96\ndevices_per_node = 4\n'))
    h100 = CHIPS["h100-sxm"]
    assert (chip.name, chip.memory, chip.lender) == ("h100-96g", 96 * 2**30, "h100-sxm")
    assert (chip.peak, chip.generation, chip.price) == (h100.peak, "hopper", h100.price)
    assert chip.domain == 4  # the fast link ends at the machine, as that of an H100 does


@pytest.mark.parametrize("name", ["h20", "tpu-v3", "gb300"])
def test_like_and_nothing_else_is_that_chip(tmp_path: Path, name: str) -> None:
    own = find_chip(written(tmp_path, f'like = "{name}"\n'))
    seconds = [
        (gemm_seconds(chip, 8192, 8192, 8192), collective_seconds(make_cluster(chip, 4), "all_reduce", 1e9, 16))
        for chip in (own, CHIPS[name])
    ]
    assert seconds[0] == seconds[1]


def test_every_mistake_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = 'tflops = { half = -3, fp3 = 5 }\nmemory_gib = "much"\nhbm_gb = 5\nunits = 1.5\nfabric = "string"\nprice = nan\n'
    assert main(["plan", f"--cluster.chip={written(tmp_path, bad)}"]) == 2
    said = capsys.readouterr().err
    wanted = ("tflops.half: -3", "tflops.fp3", "memory_gib: 'much'", "hbm_gb: there is no such key; did you mean hbm_gbs",
              "units: 1.5", '"string" is not one of rail', "price: nan", "intra_gbs: is missing")  # fmt: skip
    for words in wanted:
        assert words in said
    assert said.count("my-chip.toml") >= len(wanted)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory_gib = ", "not valid TOML"),
        (f"power_w = 1{'0' * 5000}", "not valid TOML"),
        ('like = "h10"', "no chip is called"),
        ('like = "my-chip.toml"', "no chip is called"),
        ('like = "h100"\nmemory_gib = 1\nmemory_gb = 2', "given twice"),
        ('[h100-sxm]\nlike = "h100"', "is the name of a chip in the catalogue"),
        (f"power_w = 1{'0' * 400}", "power_w"),
        ("tflops = 3", "is not a table"),
    ],
)
def test_a_bad_file_gets_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_chip(written(tmp_path, text))


def test_a_file_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster.chip=nowhere.toml"]) == 2
    assert "nowhere.toml: cannot be read: No such file" in capsys.readouterr().err


def test_a_run_finds_it_beside_itself_or_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside, here = tmp_path / "runs", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    written(beside, OWN)
    written(here, OWN, "other.toml")
    monkeypatch.chdir(here)
    run_file = beside / "run.toml"
    run_file.write_text('[layout]\nshard = 8\n[train]\ndtype = "bfloat16"\n[cluster]\nchip = "my-chip.toml"\n')
    assert read_run(run_file).cluster.chip == str((beside / "my-chip.toml").resolve())
    assert read_run(run_file, ["cluster.chip=other.toml"]).cluster.chip == str((here / "other.toml").resolve())
    assert main(["plan", str(run_file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["peak_flops"] == 500e12
    assert any("no published training run on my-chip" in note for note in plan["notes"])


def test_every_data_file_is_installed() -> None:
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    anywhere = declared.pop("*")
    places = [
        f"{package.replace('.', '/')}/{pattern}" for package, patterns in declared.items() for pattern in patterns
    ]
    files = [p for p in (root / "shardwise").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert "chips.toml" in {file.name for file in files}
    left = [file for file in files if not any(fnmatch.fnmatch(file.name, pattern) for pattern in anywhere)]
    assert not [file for file in left if not any(file.match(place) for place in places)]
