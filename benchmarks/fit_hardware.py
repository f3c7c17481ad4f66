"""Fit the constants of `shardwise/hardware/efficiency.json` to measurements, and write the file.

    python benchmarks/fit_hardware.py --calibration DIR

DIR holds the measured kernels and collectives by others (GEMM timings of AIConfigurator, collectives of AIConfigurator,
vTrain and Vidur, efficiencies of SimuMax); `h200_kernels.json` beside this script holds what this project measured on one
H200. Needs scipy and pyarrow, which the package itself does not. Every set of constants is written with its source and its
errors: the median and mean of |predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.hardware.attention import attention_seconds
from shardwise.hardware.chips import CHIPS, Chip
from shardwise.hardware.cluster import ETHERNET_LATENCY, Cluster
from shardwise.hardware.collectives import candidates
from shardwise.hardware.gemm import GemmConstants, model_seconds
from shardwise.hardware.power import Power

Row = dict[str, Any]
HERE = Path(__file__).parent
EFFICIENCY = HERE.parent / "shardwise" / "hardware" / "efficiency.json"
AIC = "AIConfigurator's operator database"


def least_squares(residual: Callable[[Any], Any], start: Any, low: Any, high: Any) -> Any:
    """Parameters that make the residuals small, without letting outliers rule; each scaled by where it starts."""
    optimize: Any = importlib.import_module("scipy.optimize")
    start, low, high = (np.asarray(values, dtype=float) for values in (start, low, high))
    found = optimize.least_squares(
        lambda scaled: residual(scaled * start),
        np.ones_like(start),
        bounds=(low / start, high / start),
        loss="soft_l1",
        f_scale=0.05,
        diff_step=1e-3,
        max_nfev=200,
    )
    return found.x * start


def errors(predicted: Any, measured: Any) -> dict[str, float]:
    """Median and mean of the relative error, and over how many points."""
    off = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return {"points": len(off), "median": round(float(np.median(off)), 4), "mean": round(float(off.mean()), 4)}


def rounded(value: Any) -> Any:
    """Four digits are more than the fits can tell."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# --- products ---

TILES = ((256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 128, 2), (64, 64, 3))
# Share of the largest tile, and of each next one relative to it; then the fields of GemmConstants in their order.
GEMM_START = (0.85, 0.90, 0.95, 0.80, 200, 256, 3e-6, 0.5, 0.88, 0.5e-6, 3.0, 2.2e-6, 0.02, 2e11)
GEMM_LOW = (0.3, 0.3, 0.3, 0.3, 0, 64, 0, 0, 0.5, 0, 1.2, 0.5e-6, 0, 1e10)
GEMM_HIGH = (0.98, 1, 1, 1, 2000, 4096, 3e-5, 1, 0.97, 5e-6, 12, 5e-6, 0.2, 1e13)


def gemm_constants(values: Any) -> GemmConstants:
    """The model's constants from the vector that is fitted."""
    shares = [float(share) for share in np.cumprod(values[:4])]  # a smaller tile is never better while it computes
    rest = [float(value) for value in values[4:14]]
    # A tile that is no better than the next smaller one is never chosen.
    kept = [which for which in range(4) if which == 3 or shares[which] > 1.001 * shares[which + 1]]
    return GemmConstants(tuple((m, n, shares[which]) for m, n, which in TILES if which in kept), *rest)


def read_gemms(path: Path, dtype: str) -> dict[str, Any]:
    """m, n, k and seconds of every product of one dtype in a parquet file."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    table = parquet.read_table(path, columns=["gemm_dtype", "m", "n", "k", "latency"])
    chosen = np.array(table["gemm_dtype"]) == dtype
    columns = {name: np.array(table[name])[chosen].astype(float) for name in ("m", "n", "k", "latency")}
    return {"m": columns["m"], "n": columns["n"], "k": columns["k"], "seconds": columns["latency"] * 1e-3}


def fit_gemm(chip: Chip, rows: dict[str, Any], dtype: str, source: str, cast: bool) -> Row:
    """Constants for one chip and dtype. With `cast` the timings include narrowing the input to `dtype`, which is fitted
    beside the product (a start-up time and a share of the memory bandwidth for three bytes an element) and left out."""
    m, n, k, seconds = (rows[name] for name in ("m", "n", "k", "seconds"))

    def predict(values: Any, at: Any) -> Any:
        product = model_seconds(gemm_constants(values), chip, m[at], n[at], k[at], dtype)
        return product + values[14] + 3 * m[at] * k[at] / (chip.hbm * values[15]) if cast else product

    large = (m >= 1024) & (n >= 512) & (k >= 512)
    weight = np.where(large, 3.0, 1.0)
    sample = np.random.default_rng(0).choice(len(m), min(8000, len(m)), replace=False, p=weight / weight.sum())
    extra = ((4e-6, 0.5), (0, 0.1), (2e-5, 1)) if cast else ((), (), ())
    values = least_squares(
        lambda trial: np.log(predict(trial, sample) / seconds[sample]),
        GEMM_START + extra[0],
        GEMM_LOW + extra[1],
        GEMM_HIGH + extra[2],
    )
    everything = predict(values, slice(None))
    training = (m >= 512) & (n >= 512) & (k >= 512)
    return {
        "constants": asdict(gemm_constants(values)),
        "source": source,
        "errors": {
            "large (m >= 1024, n and k >= 512)": errors(everything[large], seconds[large]),
            "training-sized (m, n and k >= 512)": errors(everything[training], seconds[training]),
            "small": errors(everything[~training], seconds[~training]),
            "all": errors(everything, seconds),
        },
    }


def numbers(text: str) -> dict[str, float]:
    """`name=12` pairs in one of SimuMax's keys."""
    return {name: float(value) for name, value in re.findall(r"(\w+)=(\d+)\b", text)}


def read_simumax(path: Path, operation: str) -> list[tuple[Row, str, float]]:
    """Shape, key and efficiency (of the dense peak) of each measured case."""
    table = json.loads(path.read_text(encoding="utf-8"))["accelerator"]["op"][operation]
    return [(numbers(key), key, value) for key, value in table["accurate_efficient_factor"].items()]


def scaled(lender: GemmConstants, scale: float) -> GemmConstants:
    """Constants with every tile's share scaled."""
    return replace(lender, tiles=tuple((m, n, min(share * scale, 0.98)) for m, n, share in lender.tiles))


def simumax_gemms(chip: Chip, path: Path) -> dict[str, Any]:
    """SimuMax's products, forward and backward, as shapes and seconds."""
    cases = read_simumax(path, "matmul")
    m, n, k = (np.array([shape[name] for shape, _, _ in cases]) for name in ("m", "n", "k"))
    return {"m": m, "n": n, "k": k, "seconds": 2 * m * n * k / (efficiencies(cases) * chip.peak["bfloat16"])}


def efficiencies(cases: list[tuple[Row, str, float]]) -> Any:
    return np.array([value for _, _, value in cases])


def best_scale(predict: Callable[[float], Any], seconds: Any) -> float:
    """The one factor that brings predictions nearest to measurements."""
    return float(least_squares(lambda trial: np.log(predict(trial[0]) / seconds), [0.9], [0.2], [1.4])[0])


def fit_pcie(lender: Row, path: Path) -> Row:
    """A100 PCIe: the SXM's form, at the speed of SimuMax's products on the PCIe card; so too grouped products."""
    chip = CHIPS["a100-pcie-80g"]
    constants = GemmConstants(**lender["constants"])
    rows = simumax_gemms(chip, path)
    m, n, k, seconds = (rows[name] for name in ("m", "n", "k", "seconds"))
    scale = best_scale(lambda trial: model_seconds(scaled(constants, trial), chip, m, n, k, "bfloat16"), seconds)
    fitted = scaled(constants, scale)
    cases = read_simumax(path, "group_matmul")
    fitted, grouped = fit_grouped(chip, fitted, *simumax_groups(chip, cases))
    return {
        "constants": asdict(fitted),
        "source": "SimuMax, A100 PCIe, forward and both backward products; the form is the SXM's",
        "errors": {"all": errors(model_seconds(fitted, chip, m, n, k, "bfloat16"), seconds), "grouped": grouped},
    }


def anchored(chip: Chip, lender: GemmConstants, tera: float) -> GemmConstants:
    """The form of another chip, at the TFLOP/s that an 8192-cubed product reaches on this one."""
    dtype = "bfloat16"

    def predict(scale: float) -> Any:
        return np.atleast_1d(model_seconds(scaled(lender, scale), chip, 8192, 8192, 8192, dtype))

    return scaled(lender, best_scale(predict, 2 * 8192.0**3 / (tera * 1e12)))


def fit_b200(lender: Row, path: Path) -> Row:
    """B200: Hopper's form, at the published 1745 TFLOP/s. SimuMax's card ran at two speeds, most of the time at two thirds
    of that: noted as what a long run sustains, not as the speed of a product."""
    chip = CHIPS["b200"]
    fitted = anchored(chip, GemmConstants(**lender["constants"]), 1745)
    rows = simumax_gemms(chip, path)
    shapes = (rows["m"], rows["n"], rows["k"])
    seconds = rows["seconds"]
    sustained = float(np.median(model_seconds(fitted, chip, *shapes, "bfloat16") / seconds))
    experts, each, n, k, group_seconds = simumax_groups(chip, read_simumax(path, "group_matmul"))
    fitted, grouped = fit_grouped(chip, fitted, experts, each, n, k, group_seconds * sustained)
    predicted = model_seconds(fitted, chip, *shapes, "bfloat16", 1, sustained)
    return {
        "constants": asdict(fitted),
        "source": "form of h200-sxm; speed of the published 1745 TFLOP/s; grouped products of SimuMax",
        "sustained": sustained,
        "sustained_source": "median of SimuMax's B200 products against these constants",
        "errors": {"all, at the sustained speed": errors(predicted, seconds), "grouped, likewise": grouped},
    }


# TFLOP/s in bfloat16 that large products reach on AMD's chips: AMD's own "max achievable FLOPs" for MI300X, and public
# matrix-size sweeps for the others (to about 5 %).
AMD_TERA = {"mi250x": 147, "mi300x": 708, "mi325x": 785, "mi355x": 1650}


def amd_gemms(lender: Row) -> dict[str, Any]:
    """AMD's chips: Hopper's form at the speed they are known to reach."""
    constants = GemmConstants(**lender["constants"])
    source = "form of h100-sxm; speed of large products as published"
    return {
        name: {"bfloat16": {"constants": asdict(anchored(CHIPS[name], constants, tera)), "source": source}}
        for name, tera in AMD_TERA.items()
    }


def simumax_groups(chip: Chip, cases: list[tuple[Row, str, float]]) -> tuple[Any, ...]:
    """Experts, rows of each, n, k and seconds of SimuMax's grouped products, weight gradients left out."""
    cases = [case for case in cases if "bwd_grad_w" not in case[1]]
    experts, rows, n, k = (np.array([shape[name] for shape, _, _ in cases]) for name in ("ng", "M", "N", "K"))
    return experts, rows, n, k, 2 * experts * rows * n * k / (efficiencies(cases) * chip.peak["bfloat16"])


def fit_grouped(
    chip: Chip, fitted: GemmConstants, experts: Any, rows: Any, n: Any, k: Any, seconds: Any
) -> tuple[GemmConstants, Row]:
    """How fast many products in one kernel are, relative to the model of a single one."""

    def predict(share: float) -> Any:
        return model_seconds(fitted, chip, rows, n, k, "bfloat16", experts, share)

    share = best_scale(predict, seconds)
    return replace(fitted, grouped=share), errors(predict(share), seconds)


def fit_hopper_groups(entry: Row, measured: Row) -> None:
    """Grouped products of PyTorch on an H200, and how much of the speed a long run kept."""
    chip = CHIPS["h200-sxm"]
    points = [p for p in measured["cool"] if p["kind"] == "grouped"]
    experts, tokens, n, k, seconds = (
        np.array([float(p[name]) for p in points]) for name in ("experts", "tokens", "n", "k", "seconds")
    )
    layouts = np.array([p["layout"] for p in points])
    of_weight, to_input = layouts == "NT", layouts == "NN"
    each = tokens / experts
    rows, columns = np.where(of_weight, k, each), np.where(to_input, k, n)
    inner = np.where(of_weight, each, np.where(to_input, n, k))
    plain = replace(GemmConstants(**entry["constants"]), droop=0.0)

    def predict(values: Any) -> Any:
        share = np.where(of_weight, values[1], values[0])
        return values[2] + model_seconds(plain, chip, rows, columns, inner, "bfloat16", experts, share)

    values = least_squares(
        lambda trial: np.log(predict(trial) / seconds), [0.97, 0.9, 1e-5], [0.5, 0.5, 1e-7], [1.2, 1.2, 5e-5]
    )
    entry["constants"] |= dict(zip(("grouped", "grouped_weight", "grouped_start"), map(float, values), strict=True))
    entry["errors"]["grouped (PyTorch 2.11, H200)"] = errors(predict(values), seconds)
    fitted = GemmConstants(**entry["constants"])
    runs = measured["sustained"]
    predicted = [model_seconds(fitted, chip, run["m"], run["n"], run["k"], "bfloat16") for run in runs]
    late = [np.mean(run["seconds"][6:]) for run in runs]
    entry["sustained"] = float(np.mean(np.array(predicted) / late))
    entry["sustained_source"] = "products after some seconds without pause against these constants, H200 at 700 W"


def exact_speed(measured: Row) -> float:
    """Speed of an fp8 GEMM without fast accumulation relative to one with it."""
    fast, exact = (
        {
            (p["m"], p["n"], p["k"], p["layout"]): p["seconds"]
            for p in measured["cool"]
            if p.get("fast") is way and p["scaling"] == "tensorwise"
        }
        for way in (True, False)
    )
    return float(np.median([seconds / exact[shape] for shape, seconds in fast.items()]))


def gemm_table(folder: Path, measured: Row) -> dict[str, Any]:
    """The products of every chip that was measured."""
    files = {
        "a100-sxm-80g": ("aic_a100_sxm_gemm_trtllm_1.0.0_gemm_perf.parquet", ("bfloat16",)),
        "h100-sxm": ("aic_h100_sxm_gemm_trtllm_1.3.0rc20_gemm_perf.parquet", ("bfloat16", "fp8")),
        "h200-sxm": ("aic_h200_sxm_gemm_trtllm_1.3.0rc20_gemm_perf.parquet", ("bfloat16", "fp8")),
    }
    table: dict[str, Any] = {
        name: {
            dtype: fit_gemm(CHIPS[name], read_gemms(folder / file, dtype), dtype, f"{AIC}, {name}", dtype == "fp8")
            for dtype in dtypes
        }
        for name, (file, dtypes) in files.items()
    }
    fit_hopper_groups(table["h200-sxm"]["bfloat16"], measured)
    for entry in (table["h100-sxm"]["bfloat16"], table["h100-sxm"]["fp8"], table["h200-sxm"]["fp8"]):
        for name in ("grouped", "grouped_weight", "grouped_start"):
            entry["constants"][name] = table["h200-sxm"]["bfloat16"]["constants"][name]
    for name in ("h100-sxm", "h200-sxm"):
        table[name]["fp8"]["constants"]["exact"] = exact_speed(measured)
    table["a100-pcie-80g"] = {
        "bfloat16": fit_pcie(table["a100-sxm-80g"]["bfloat16"], folder / "simumax_a100_pcie.json")
    }
    table["a100-sxm-80g"]["bfloat16"]["constants"]["grouped"] = table["a100-pcie-80g"]["bfloat16"]["constants"][
        "grouped"
    ]
    table |= amd_gemms(table["h100-sxm"]["bfloat16"])
    table["b200"] = {"bfloat16": fit_b200(table["h200-sxm"]["bfloat16"], folder / "simumax_b200_bf16_ceperm.json")}
    return table


# --- attention ---

HEAD_DIMS = [64.0, 96.0, 128.0, 192.0, 256.0]
ATTENTION_START = (0.4, 0.45, 0.5, 0.5, 0.5, 120, 90, 0.7, 0.9, 4e-6)
ATTENTION_LOW = (0.05,) * 5 + (0.01, 0.01, 0.05, 0.3, 0.5e-6)
ATTENTION_HIGH = (0.98,) * 5 + (2000, 2000, 2, 0.97, 2e-5)


def attention_constants(values: Any) -> Row:
    """What `attention_seconds` reads, from the vector that is fitted."""
    names = ("extra", "diagonal", "tail", "memory", "floor")
    rest = {name: float(value) for name, value in zip(names, values[5:], strict=True)}
    return {"head_dims": HEAD_DIMS, "shares": [float(v) for v in values[:5]], **rest, "norm": 4.0}


def predict_attention(chip: Chip, constants: Row, points: list[Row], direction: str) -> Any:
    """The model with trial constants, at each point."""
    result = []
    for causal in (True, False):
        chosen = [i for i, p in enumerate(points) if p["causal"] == causal]
        columns = {
            name: np.array([float(points[i][name]) for i in chosen])
            for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "v_dim")
        }
        how: dict[str, Any] = dict(columns, causal=causal, direction=direction, fitted=constants)
        kernel: Any = points[chosen[0]].get("kernel", "flash3") if chosen else "flash3"
        seconds = attention_seconds(chip, **how, kernel=kernel)
        result += list(zip(chosen, np.atleast_1d(seconds), strict=True))
    return np.array([seconds for _, seconds in sorted(result)])


def fit_attention(chip: Chip, points: list[Row], direction: str, source: str) -> Row:
    """Constants of one kernel and direction."""
    points = [dict(p, v_dim=p.get("v_dim", p["head_dim"])) for p in points if p[direction]]
    seconds = np.array([p[direction] for p in points])
    values = least_squares(
        lambda trial: np.log(predict_attention(chip, attention_constants(trial), points, direction) / seconds),
        ATTENTION_START,
        ATTENTION_LOW,
        ATTENTION_HIGH,
    )
    predicted = predict_attention(chip, attention_constants(values), points, direction)
    full = np.array(
        [p["batch"] * p["heads"] * p["queries"] >= 2 * 128 * chip.units and p["queries"] > 1 for p in points]
    )
    report = {"all": errors(predicted, seconds), "chip filled": errors(predicted[full], seconds[full])}
    return {"constants": attention_constants(values), "source": source, "errors": report}


MIXED = 160.0
"""The mean width of keys of 192 and values of 128."""


def with_wide_keys(chip: Chip, entry: Row, points: list[Row], direction: str) -> Row:
    """The constants with a share for keys that are wider than values, which other widths do not tell."""
    fitted = entry["constants"]
    place = sum(width < MIXED for width in fitted["head_dims"])
    seconds = np.array([p[direction] for p in points])

    def constants(share: float) -> Row:
        widths, shares = list(fitted["head_dims"]), list(fitted["shares"])
        return {
            **fitted,
            "head_dims": [*widths[:place], MIXED, *widths[place:]],
            "shares": [*shares[:place], share, *shares[place:]],
        }

    def predicted(share: float) -> Any:
        return predict_attention(chip, constants(share), points, direction)

    (share,) = least_squares(lambda trial: np.log(predicted(trial[0]) / seconds), [0.6], [0.1], [0.98])
    report = entry["errors"] | {"keys wider than values": errors(predicted(share), seconds)}
    return {**entry, "constants": constants(float(share)), "errors": report}


def with_shares(entry: Row, shares: list[float], source: str) -> Row:
    """Another chip's form with shares of its own."""
    return {"constants": {**entry["constants"], "shares": shares}, "source": source}


def simumax_attention(chip: Chip, path: Path, direction: str) -> tuple[list[Row], Any]:
    """SimuMax's causal attention as shapes and seconds. It counts the pairs that the mask hides, and times the launch with
    the kernel, so only kernels beyond 0.3 ms are used."""
    points, seconds = [], []
    for shape, _, value in read_simumax(path, "sdp_fwd" if direction == "forward" else "sdp_bwd"):
        length, heads, wide, narrow = (shape[name] for name in ("seq_len", "head_num", "qk_head_dim", "v_head_dim"))
        flops = 2 * heads * length**2 * (wide + narrow) * (2.5 if direction == "backward" else 1.0)
        if (time := flops / (value * chip.peak["bfloat16"])) > 3e-4:
            sizes = {"queries": length, "keys": length, "head_dim": wide, "v_dim": narrow}
            points.append({"batch": 1, "heads": heads, "kv_heads": shape["kv_head_num"], "causal": True, **sizes})
            seconds.append(time)
    return points, np.array(seconds)


def unmeasured(entry: Row) -> Row:
    """Hopper's shares for a chip of another maker."""
    return with_shares(entry, entry["constants"]["shares"], "Hopper's shares of the peak; not measured on these chips")


def fit_b200_attention(entry: Row, path: Path, direction: str) -> Row:
    """cuDNN on B200 by SimuMax: Hopper's form, shares for 128 and for keys of 192 with values of 128."""
    chip = CHIPS["b200"]
    points, seconds = simumax_attention(chip, path, direction)

    def constants(trial: Any) -> Row:
        # Smaller heads keep the ratio that they have on Hopper.
        old, wide = entry["constants"]["shares"], 2 * trial[1] - trial[0]
        shares = [old[0] * trial[0] / old[2], old[1] * trial[0] / old[2], trial[0], trial[1], wide, wide]
        return {**entry["constants"], "shares": [float(share) for share in shares]}

    values = least_squares(
        lambda trial: np.log(predict_attention(chip, constants(trial), points, direction) / seconds),
        [0.5, 0.45],
        [0.2, 0.2],
        [0.95, 0.95],
    )
    report = errors(predict_attention(chip, constants(values), points, direction), seconds)
    source = "SimuMax, B200; the form and head sizes below 128 as on h200-sxm"
    return {"constants": constants(values), "source": source, "errors": {"beyond 0.3 ms": report}}


def check_ampere(ampere: Row, path: Path) -> None:
    """How far the published A100 speeds are from SimuMax's A100 PCIe, a card of 300 W."""
    chip = CHIPS["a100-pcie-80g"]
    for direction in ("forward", "backward"):
        entry = ampere["flash2"][direction]
        points, seconds = simumax_attention(chip, path, direction)
        predicted = predict_attention(chip, entry["constants"], points, direction)
        entry["errors"] = {"SimuMax's A100 PCIe, beyond 0.3 ms": errors(predicted, seconds)}


def attention_table(folder: Path, measured: Row) -> dict[str, Any]:
    """FlashAttention 1 to 3 on every generation that was measured or published."""
    chip = CHIPS["h200-sxm"]
    hopper: dict[str, Any] = {}
    for kernel, name in (("flash2", "FlashAttention-2"), ("flash3", "cuDNN")):
        points = [p for p in measured["attention"] if p["kernel"] == kernel]
        wide = [p for p in points if kernel == "flash3" and p.get("v_dim", p["head_dim"]) != p["head_dim"]]
        source = f"PyTorch 2.11 on an H200, {name}"
        others = [p for p in points if p not in wide]
        hopper[kernel] = {d: fit_attention(chip, others, d, source) for d in ("forward", "backward")}
        if wide:
            hopper[kernel] = {d: with_wide_keys(chip, entry, wide, d) for d, entry in hopper[kernel].items()}
    paper2 = "FlashAttention-2 paper, figures 5 and 6 (A100 SXM, to about 5 %); the form is Hopper's"
    paper1 = "FlashAttention-1 as shown in the FlashAttention-2 paper, figures 5 and 6; the form is Hopper's"
    ampere = {
        "flash2": {
            "forward": with_shares(hopper["flash2"]["forward"], [0.63, 0.68, 0.74, 0.66, 0.60], paper2),
            "backward": with_shares(hopper["flash2"]["backward"], [0.56, 0.58, 0.66, 0.55, 0.50], paper2),
        },
        "flash1": {
            "forward": with_shares(hopper["flash2"]["forward"], [0.40, 0.40, 0.42, 0.33, 0.30], paper1),
            "backward": with_shares(hopper["flash2"]["backward"], [0.34, 0.32, 0.29, 0.25, 0.22], paper1),
        },
    }
    check_ampere(ampere, folder / "simumax_a100_pcie.json")
    hopper["flash1"] = {d: first_on_hopper(hopper, ampere, d) for d in ("forward", "backward")}
    path = folder / "simumax_b200_bf16_ceperm.json"
    blackwell = {
        "flash3": {d: fit_b200_attention(hopper["flash3"][d], path, d) for d in ("forward", "backward")},
        # No kernel of the second generation was written for Blackwell: it runs at Hopper's speed a unit and clock.
        "flash2": {
            d: with_shares(
                hopper["flash2"][d],
                [share * 989.4 / 2250 * 148 / 132 for share in hopper["flash2"][d]["constants"]["shares"]],
                "FlashAttention-2 on Hopper, as many FLOP/s a unit",
            )
            for d in ("forward", "backward")
        },
    }
    # AMD's kernels are of the second generation's form.
    cdna = {kernel: {d: unmeasured(hopper[kernel][d]) for d in hopper[kernel]} for kernel in ("flash1", "flash2")}
    return {"h200-sxm": hopper, "a100-sxm-80g": ampere, "b200": blackwell, "mi300x": cdna}


def first_on_hopper(hopper: Row, ampere: Row, direction: str) -> Row:
    """FlashAttention-1 on Hopper, which nobody measured."""
    second, first, reference = (
        table[kernel][direction]["constants"]["shares"]
        for table, kernel in ((hopper, "flash2"), (ampere, "flash1"), (ampere, "flash2"))
    )
    shares = [a * b / c for a, b, c in zip(second, first, reference, strict=True)]
    source = "FlashAttention-2 on Hopper times the ratio of the two kernels on an A100"
    return with_shares(hopper["flash2"][direction], shares, source)


# --- memory ---


def memory_table(measured: Row) -> dict[str, Any]:
    """Kernels that only move bytes; those that fit in the cache are left out, a long step would not find them there."""
    chip = CHIPS["h200-sxm"]
    points = [p for p in measured["memory"] if p["bytes"] >= 2**26 or p["bytes"] <= 2**22]
    moved, seconds = (np.array([float(p[name]) for p in points]) for name in ("bytes", "seconds"))

    def predict(values: Any) -> Any:
        return values[0] + moved / (chip.hbm * values[1])

    floor, share = least_squares(lambda v: np.log(predict(v) / seconds), [2e-6, 0.88], [1e-6, 0.5], [5e-6, 0.97])
    large = moved >= 2**26
    return {
        "h200-sxm": {
            "constants": {"floor": float(floor), "share": float(share)},
            "source": "copy, add, SiLU and RMS norm of PyTorch 2.11 on an H200",
            "errors": {"64 MiB and more": errors(predict((floor, share))[large], seconds[large])},
        }
    }


# --- power ---

READING = 0.2
"""What a reading of the power counts beside one of the clock: it is a mean over less of the time."""
WITHOUT_PAUSE = 4.0
"""What readings without pauses count beside the others, into which the clocks of pauses are mixed."""


KINDS = {"matmul": "matmul", "experts": "hot", "fp8": "hot", "attention": "attention", "memory": "memory"}
"""The planner's kinds of kernels, by those of `clock.py`."""


def power_table(measured: Row) -> dict[str, Any]:
    """The clock at any load, and the time of kernels at any clock, without pauses of over 10 ms: the clock rises behind them."""
    rows = [row for row in measured["clock"] if row.get("pause_ms", np.inf) <= 10]
    seen = np.array([row["mhz"] / measured["most_mhz"] for row in rows])
    watts, loads = (np.array([float(row[name]) for row in rows]) for name in ("watts", "load"))
    kinds = tuple(dict.fromkeys(KINDS.values()))
    shares = np.zeros((len(rows), len(kinds)))
    for row, line in zip(rows, shares, strict=True):
        for kind, ms in row["round_ms"].items():
            line[kinds.index(KINDS[kind])] += ms / sum(row["round_ms"].values())

    machines = np.array([row["machine"] for row in rows])
    many = int(machines.max()) + 1  # each draws a little more or less than their mean

    def split(values: Any) -> tuple[Any, Any, Any, Any]:
        """Limit, idle power and exponent; and the power of the kernels of each row."""
        limit, idle, exponent, *each = values
        kernels, own = np.array(each[:-many]), np.array(each[-many:])
        return limit, idle, exponent, loads * (shares @ kernels) * (own / own.mean())[machines]

    def clock(values: Any) -> Any:
        limit, idle, exponent, power = split(values)
        return np.minimum(1.0, ((limit - idle) / power) ** (1 / exponent))

    def residual(values: Any) -> Any:
        _, idle, exponent, power = split(values)
        off = np.log(clock(values) / seen), READING * np.log((idle + power * seen**exponent) / watts)
        return np.concatenate([each * np.where(loads > 0.95, WITHOUT_PAUSE, 1.0) for each in off])

    start, low, high = (
        [680, 110, 1.7, 950, 1000, 740, 360, *[1.0] * many],
        [600, 60, 1.0, 500, 500, 300, 150, *[0.8] * many],
        [700, 200, 3.0, *[1500] * 4, *[1.25] * many],
    )
    values = least_squares(residual, start, low, high)
    limit, idle, exponent, *each = values
    drawn = dict(zip(kinds, map(float, each[: len(kinds)]), strict=True))
    told = times_by_clock(rows, kinds, float(measured["most_mhz"]))

    def off(values: Any) -> Any:
        power = Power(limit, idle, exponent, drawn, dict(zip(kinds, values[1:], strict=True)), values[0], 0.0)
        return np.concatenate([np.log(power.slower(kind, told[kind][0]) / told[kind][1]) for kind in kinds])

    sharpness, *bound = least_squares(off, [10, 0.9, 0.9, 1.0, 0.6], [4, *[0.3] * 4], [30, *[1.2] * 4])
    return {
        "h200-sxm": {
            "constants": {
                "limit": float(limit), "idle": float(idle), "exponent": float(exponent), "watts": drawn, "boost": boost(measured),
                "bound": dict(zip(kinds, map(float, bound), strict=True)), "sharpness": float(sharpness),
            },
            "source": "GEMMs, attention and copies with pauses between them, PyTorch 2.11 on three H200 (benchmarks/gpu/clock.py)",
            "errors": {"clock": errors(clock(values), seen)},
        }
    }  # fmt: skip


BIN = 0.02
"""Seconds of a median behind a rest."""


def boost(measured: Row) -> float:
    """Seconds behind a rest until a chip that works without pause lowers its clock: when calls take longer than halfway between the
    first ones and most."""
    found = []
    for row in measured["clock"]:
        if "behind_ms" in row:
            first, most = row["behind_ms"][0], float(np.median(row["behind_ms"]))
            found.append(BIN * next(n for n, ms in enumerate(row["behind_ms"]) if ms > (first + most) / 2))
    return float(np.median(found))


def times_by_clock(rows: list[Row], kinds: tuple[str, ...], most: float) -> dict[str, tuple[Any, Any]]:
    """Of each kind the clocks, and how many times as long as at the highest clock its kernels took."""
    found: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in kinds}
    fastest: dict[tuple[int, str], float] = {}
    for row in rows:
        for name, ms in row["ms"].items():
            fastest[row["machine"], name] = min(fastest.get((row["machine"], name), np.inf), ms)
    for row in rows:
        for name, ms in row["ms"].items():
            clocks, times = found[KINDS[kind_of_kernel(name)]]
            clocks.append(row["mhz"] / most)
            times.append(ms / fastest[row["machine"], name])
    return {kind: (np.array(clocks), np.array(times)) for kind, (clocks, times) in found.items()}


def kind_of_kernel(name: str) -> str:
    """The kind of a kernel that `clock.py` ran."""
    first = name.split()[0]
    return {"copy": "memory", "attention": "attention", "experts": "experts", "fp8": "fp8"}.get(first, "matmul")


# --- collectives ---

MIB = 2**20
RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def read_collectives(folder: Path, chip: str) -> list[Row]:
    """Collectives inside one machine: operation, bytes, ranks and seconds."""
    rows: list[Row] = []
    if chip == "a100-sxm-80g":
        parquet: Any = importlib.import_module("pyarrow.parquet")
        for row in parquet.read_table(folder / "aic_a100_sxm_comm_nccl_2.27.3_nccl_perf.parquet").to_pylist():
            operation = "all_to_all" if row["op_name"] == "alltoall" else row["op_name"]
            moved = row["message_size"] * (2 if row["nccl_dtype"] == "half" else 1)
            rows.append(_point(operation, moved, row["num_gpus"], row["latency"] * 1e-3, "AIConfigurator"))
        for ranks in (2, 4, 8):
            with (folder / f"a100_allreduce_gpu{ranks}.csv").open(encoding="utf-8") as file:
                for cells in list(csv.reader(file))[1:]:
                    rows.append(_point("all_reduce", int(cells[0]), ranks, int(cells[3]) * 1e-9, "vTrain"))
    files = {
        "a100-sxm-80g": [
            ("all_reduce", "vidur_a100_dgx_all_reduce.csv"),
            ("send_recv", "vidur_a100_dgx_send_recv.csv"),
        ],
        "h100-sxm": [("all_reduce", "vidur_h100_all_reduce.csv")],
    }
    for name, file_name in files[chip]:
        with (folder / file_name).open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if line["devices_per_node"] == line["num_workers"] and line["rank"] == "0":
                    seconds = float(line[f"time_stats.{name}.median"]) * 1e-3
                    operation = "send" if name == "send_recv" else name
                    rows.append(_point(operation, int(line["size"]), int(line["num_workers"]), seconds, "Vidur"))
    return rows


def _point(operation: str, moved: int, ranks: int, seconds: float, source: str) -> Row:
    return {"operation": operation, "bytes": moved, "size": ranks, "seconds": seconds, "source": source}


# Published all-reduce bus bandwidth, GB/s by MiB.
H200_BUS = {1: 40, 16: 220, 64: 347, 512: 450, 16384: 482}
B200_EFA_BUS = {1: 5.4, 64: 157, 1024: 362, 16384: 382}


def bus_points(bus: Mapping[int, float], ranks: int) -> list[Row]:
    """All-reduces from their bus bandwidth, 2 (n-1)/n of the buffer over the time."""
    share = 2 * (ranks - 1) / ranks
    return [
        _point("all_reduce", mib * MIB, ranks, share * mib * MIB / (gbs * 1e9), "published") for mib, gbs in bus.items()
    ]


COLLECTIVE_NAMES = ("base", "hop", "flagged_share", "buffered_base", "pipelining", "peer", "send_share")
COLLECTIVE_START = (7e-6, 1e-6, 0.25, 3e-5, 2.0, 0.7e-6, 0.85)
COLLECTIVE_LOW = (3e-6, 0.2e-6, 0.02, 5e-6, 0.05, 0.05e-6, 0.5)
COLLECTIVE_HIGH = (3e-5, 4e-6, 0.9, 1e-4, 20, 4e-6, 0.97)
SHARED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# Between machines, for want of measurements over InfiniBand in the calibration: NCCL's own tuning table has 2.7 µs a hop, its
# authors see 192 GB/s over eight cards of 25 GB/s and 46 to 48 over one of 50; 0.92 to 0.95 is what trees keep of a ring.
NETWORK = {"inter_hop": 3e-6, "inter_share": 0.95, "inter_peer": 1.0e-6, "tree_share": 0.94}


def collective_constants(values: Any) -> Row:
    """What `collective_seconds` reads, from the vector that is fitted."""
    first = len(COLLECTIVE_NAMES)
    named = {name: float(v) for name, v in zip(COLLECTIVE_NAMES, values[:first], strict=True)}
    shares = {op: [float(values[first + 2 * i]), float(values[first + 1 + 2 * i])] for i, op in enumerate(SHARED)}
    return {**named, "shares": {**shares, "broadcast": shares["all_gather"]}, **NETWORK}


def predict_collectives(chip: Chip, constants: Row, rows: list[Row], nodes: int = 1, fabric: str = "rail") -> Any:
    """The model with trial constants, at each point."""
    cluster = cluster_of(chip, constants, nodes, fabric)
    result = np.empty(len(rows))
    for operation in {row["operation"] for row in rows}:
        chosen = [i for i, row in enumerate(rows) if row["operation"] == operation]
        moved, ranks = (np.array([float(rows[i][name]) for i in chosen]) for name in ("bytes", "size"))
        times = candidates(cluster, constants, operation, moved, ranks, 1, 1)
        result[chosen] = np.minimum.reduce(list(times.values()))
    return result


def cluster_of(chip: Chip, constants: Row, nodes: int, fabric: str) -> Cluster:
    """Machines of eight with trial constants."""
    slow = ETHERNET_LATENCY if fabric == "ethernet" else 1.0
    return Cluster(
        chip=chip,
        devices=8 * nodes,
        per_node=8,
        domain=8,
        intra=chip.intra,
        inter=chip.inter,
        intra_latency=constants["hop"],
        inter_latency=constants["inter_hop"] * slow,
        pod=256,
        in_switch="in_switch_share" in constants,
    )


def collective_report(chip: Chip, constants: Row, rows: list[Row]) -> Row:
    """Errors from 1 MiB on by operation and source."""
    predicted = predict_collectives(chip, constants, rows)
    seconds = np.array([row["seconds"] for row in rows])
    report = {}
    for key in sorted({(row["operation"], row["source"]) for row in rows}):
        chosen = np.array([(row["operation"], row["source"]) == key and row["bytes"] >= MIB for row in rows])
        report[f"{key[0]}, {key[1]}, 1 MiB and more"] = errors(predicted[chosen], seconds[chosen])
    for source in sorted({row["source"] for row in rows}):
        small = np.array([row["bytes"] < MIB and row["source"] == source for row in rows])
        if small.any():
            report[f"all operations, {source}, below 1 MiB"] = errors(predicted[small], seconds[small])
    return report


def thinned(rows: list[Row]) -> list[Row]:
    """Long series cut down, so that each source weighs about as much as the others."""
    result = []
    for key in sorted({(row["operation"], row["source"], row["size"]) for row in rows}):
        series = sorted(
            (row for row in rows if (row["operation"], row["source"], row["size"]) == key), key=lambda row: row["bytes"]
        )
        wanted = np.unique(np.geomspace(1, len(series), 40).astype(int) - 1)
        result += [series[i] for i in wanted]
    return result


def fit_a100_collectives(rows: list[Row]) -> Row:
    """All constants of one chip with a ring in the machine."""
    chip, sample = CHIPS["a100-sxm-80g"], thinned(rows)
    seconds = np.array([row["seconds"] for row in sample])
    weight = np.where(np.array([row["bytes"] for row in sample]) >= MIB, 1.0, 0.4)
    values = least_squares(
        lambda trial: weight * np.log(predict_collectives(chip, collective_constants(trial), sample) / seconds),
        COLLECTIVE_START + (0.8, 0.3) * 4,
        COLLECTIVE_LOW + (0.5, 0.01) * 4,
        COLLECTIVE_HIGH + (0.97, 1.2) * 4,
    )
    constants = collective_constants(values)
    return {
        "constants": constants,
        "source": "AIConfigurator (NCCL 2.27), vTrain and Vidur, 2 to 8 A100",
        "errors": collective_report(chip, constants, rows),
    }


def fit_h100_collectives(lender: Row, rows: list[Row]) -> Row:
    """Hopper, by Vidur's all-reduces and the published ones of an H200 machine, where the switch adds up itself. Small
    messages start as on an A100 (Vidur's are not steady there), and other operations keep the ratio to all-reduce that they
    have on an A100."""
    chip, old = CHIPS["h100-sxm"], lender["constants"]
    published = bus_points(H200_BUS, 8)
    sample = [row for row in thinned(rows) if row["bytes"] >= MIB] + published * 3
    seconds = np.array([row["seconds"] for row in sample])

    def constants(values: Any) -> Row:
        scale = float(values[0]) / old["shares"]["all_reduce"][0]
        shares = {op: [pair[0] * scale, pair[1]] for op, pair in old["shares"].items()}
        shares["all_reduce"][1] = float(values[1])
        names = ("buffered_base", "pipelining", "in_switch_share", "in_switch_base", "in_switch_pipelining")
        named = {name: float(value) for name, value in zip(names, values[2:], strict=True)}
        return {**old, "shares": shares, "send_share": 376 / 450, **named}

    values = least_squares(
        lambda trial: np.log(predict_collectives(chip, constants(trial), sample) / seconds),
        (0.85, 0.2, 3e-5, 1.0, 0.62, 3e-5, 1.0),
        (0.75, 0.01, 1e-5, 0.5, 0.5, 1e-5, 0.1),
        (0.90, 1.0, 6e-5, 4.0, 0.8, 6e-5, 9.0),
    )
    final = constants(values)
    report = collective_report(chip, final, rows)
    report["all_reduce, 8 H200 published"] = errors(
        predict_collectives(chip, final, published), [row["seconds"] for row in published]
    )
    source = (
        "Vidur (2 to 8 H100) and the published 8-H200 all-reduce; other operations relative to it as on a100-sxm-80g"
    )
    return {"constants": final, "source": source, "errors": report}


def b200_collectives(lender: Row, folder: Path) -> Row:
    """B200: shares of the link from SimuMax's fits, the switch's as NCCL rates it against Hopper (0.74 to 0.85)."""
    path = folder / "simumax_b200_bf16_ceperm.json"
    ops = json.loads(path.read_text(encoding="utf-8"))["networks"]["high_intra_node"]["op"]
    names = {
        "all_reduce": "all_reduce",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "all_to_all": "all2all",
    }
    shares = {op: [ops[name]["efficient_factor"], 0.0] for op, name in names.items()}
    constants = {
        **lender["constants"],
        "shares": {**shares, "broadcast": shares["all_gather"]},
        "in_switch_share": lender["constants"]["in_switch_share"] * 0.74 / 0.85,
    }
    efa = bus_points(B200_EFA_BUS, 32)
    predicted = predict_collectives(CHIPS["b200"], constants, efa, nodes=4, fabric="ethernet")
    return {
        "constants": constants,
        "source": "shares of SimuMax's B200 fits; latencies of h100-sxm",
        "errors": {"4 machines on EFA, published": errors(predicted, [row["seconds"] for row in efa])},
    }


def collective_table(folder: Path) -> dict[str, Any]:
    """Every chip whose collectives were measured."""
    a100 = fit_a100_collectives(read_collectives(folder, "a100-sxm-80g"))
    h100 = fit_h100_collectives(a100, read_collectives(folder, "h100-sxm"))
    # SimuMax's eight PCIe cards: 12.5 of 32 GB/s in an all-reduce.
    flat = {op: [0.39, 0.0] for op in a100["constants"]["shares"]}
    pcie = {
        "constants": {**a100["constants"], "shares": flat, "send_share": 0.7},
        "source": "SimuMax's fit of 8 A100 on PCIe; latencies of a100-sxm-80g",
    }
    return {"a100-sxm-80g": a100, "h100-sxm": h100, "b200": b200_collectives(h100, folder), "a100-pcie-80g": pcie}


# --- what is borrowed ---

LENDERS: dict[str, dict[str, str]] = {
    "gemm": {
        "v100-sxm-32g": "a100-sxm-80g",
        "a100-sxm-40g": "a100-sxm-80g",
        "a800-sxm-80g": "a100-sxm-80g",
        "h100-pcie": "h100-sxm",
        "h800-sxm": "h100-sxm",
        "b300": "b200",
        "gb200": "b200",
        "gb300": "b200",
        "tpu-v3": "a100-sxm-80g",
        "tpu-v4": "a100-sxm-80g",
        "tpu-v5p": "a100-sxm-80g",
        "cpu": "a100-sxm-80g",
        "h20": "h100-sxm",
        "l40s": "a100-sxm-80g",
        "l4": "a100-sxm-80g",
        "rtx-4090": "a100-sxm-80g",
        "a10g": "a100-sxm-80g",
        "a10": "a100-sxm-80g",
        "mi250": "mi250x",
    }
}
LENDERS["attention"] = {
    **LENDERS["gemm"],
    "a100-pcie-80g": "a100-sxm-80g",
    "h100-sxm": "h200-sxm",
    "mi250x": "mi300x",
    "mi325x": "mi300x",
    "mi355x": "mi300x",
}
LENDERS["memory"] = {name: "h200-sxm" for name in CHIPS if name != "h200-sxm"}
LENDERS["power"] = {"h100-sxm": "h200-sxm", "h800-sxm": "h200-sxm"}
"""The same processor under the same limit. Nobody has measured others here: they are as fast at any load."""
LENDERS["collectives"] = {
    **LENDERS["gemm"],
    "h200-sxm": "h100-sxm",
    "h100-pcie": "a100-pcie-80g",
    **dict.fromkeys(("l40s", "l4", "rtx-4090", "a10g", "a10"), "a100-pcie-80g"),  # PCIe
    "mi250x": "a100-sxm-80g",
    "mi300x": "a100-sxm-80g",
    "mi325x": "a100-sxm-80g",
    "mi355x": "a100-sxm-80g",
}


def borrowed(kind: str) -> dict[str, str]:
    """For each chip without measurements the one whose constants it takes, relative to its own figures."""
    return LENDERS[kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, required=True, help="folder with the measurements of others")
    parser.add_argument("--out", type=Path, default=EFFICIENCY, help="file to write")
    arguments = parser.parse_args()
    measured = json.loads((HERE / "h200_kernels.json").read_text(encoding="utf-8"))
    folder = arguments.calibration
    result = {
        "gemm": gemm_table(folder, measured) | borrowed("gemm"),
        "attention": attention_table(folder, measured) | borrowed("attention"),
        "memory": memory_table(measured) | borrowed("memory"),
        "power": power_table(measured) | borrowed("power"),
        "collectives": collective_table(folder) | borrowed("collectives"),
    }
    arguments.out.write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
