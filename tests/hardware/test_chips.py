"""The catalogue: complete, sensible, found by name, and changed by a power cap or another memory."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.hardware import ALIASES, CHIPS, chip_of_driver_name, find_chip
from shardwise.hardware.chips import ITEM_BYTES
from shardwise.run import UserError

NAMES = [
    "v100-sxm-32g",
    "a100-sxm-40g",
    "a100-sxm-80g",
    "a100-pcie-80g",
    "a800-sxm-80g",
    "h100-sxm",
    "h100-pcie",
    "h800-sxm",
    "h200-sxm",
    "h20",
    "l40s",
    "l4",
    "rtx-4090",
    "a10g",
    "a10",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "mi250x",
    "mi250",
    "mi300x",
    "mi325x",
    "mi355x",
    "tpu-v3",
    "tpu-v4",
    "tpu-v5p",
    "cpu",
]


def test_every_promised_chip_is_there() -> None:
    assert set(CHIPS) == set(NAMES)
    assert all(chip.name == name for name, chip in CHIPS.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_chips_figures_make_sense(name: str) -> None:
    chip = CHIPS[name]
    assert set(chip.peak) <= set(ITEM_BYTES)
    assert chip.peak["float32"] <= max(chip.peak.get("bfloat16", 0), chip.peak.get("float16", 0))
    assert chip.peak.get("fp8", 1e30) >= chip.peak.get("bfloat16", 0)
    for field in dataclasses.fields(chip):
        value = getattr(chip, field.name)
        if isinstance(value, int | float) and field.name != "price":
            assert value > 0, field.name
    assert chip.intra > chip.inter
    assert chip.domain >= chip.devices_per_node


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X/MI250", "mi250x"),
        ("AMD Instinct MI250", "mi250"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32g"),
    ],
)
def test_a_drivers_name_finds_its_chip(driver: str, name: str) -> None:
    chip = chip_of_driver_name(driver)
    assert chip is not None
    assert chip.name == name


def test_an_unknown_driver_name_finds_none() -> None:
    assert chip_of_driver_name("NVIDIA GeForce GTX 1080") is None
    assert chip_of_driver_name("NVIDIA L40") is None  # no L4
    assert chip_of_driver_name("NVIDIA GH200 480GB") is None  # no H200
    assert chip_of_driver_name("NVIDIA RTX A1000") is None  # no A10 or A100


def test_short_names_and_spellings() -> None:
    assert find_chip("H100").name == "h100-sxm"
    assert find_chip("A100_SXM_40G").name == "a100-sxm-40g"
    assert all(find_chip(alias).name == name for alias, name in ALIASES.items())


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("a100-40gb", "a100-sxm-40g"),
        ("A100-80GB", "a100-sxm-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80g"),
        ("h100-80gb", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("H20", "h20"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("L40S", "l40s"),
        ("l4", "l4"),
        ("A10G", "a10g"),
        ("a10", "a10"),
        ("AMD Instinct MI250", "mi250"),
        ("v100-32gb", "v100-sxm-32g"),
    ],
)
def test_common_spellings_are_known(spelling: str, name: str) -> None:
    assert find_chip(spelling).name == name


def test_a_misspelt_name_gets_the_near_ones() -> None:
    with pytest.raises(UserError, match='no chip is called "h10"; did you mean h100'):
        find_chip("h10")
    with pytest.raises(UserError, match="known: v100-sxm-32g"):
        find_chip("abacus")


def test_a_power_cap_slows_and_other_memory_replaces() -> None:
    chip = CHIPS["h100-sxm"]
    capped = chip.altered(power_w=500, hbm_gbs=2400)
    assert 0.85 < capped.speed("bfloat16") / chip.speed("bfloat16") < 0.90  # published: 10 to 15 % slower
    assert capped.hbm == 2.4e12
    assert capped.peak == chip.peak
    assert chip.altered(power_w=2000).clock == 1.0
    assert chip.altered() == chip


def test_a_dtype_a_chip_lacks_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="v100-sxm-32g has no bfloat16 GEMMs; it has float64, float32, float16"):
        CHIPS["v100-sxm-32g"].speed("bfloat16")
