"""Saved tensors in few bits: against NumPy bit for bit, and layers that keep them so against the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from interpreted_kernels import Interpreter
from parallel_pool import RankPool

from shardwise.measure.verify import TOLERANCE, verify_rank
from shardwise.parallel.activations import quantized as quantized_activations
from shardwise.run import Run
from shardwise.run.saved_tensors import GROUP, quantized_bytes
from shardwise.train.step import TrainState

OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("tied", {}, "bfloat16"),
    ("parallel", {}, "float64"),
    ("mixture", {}, "float32"),
]
LARGE = pytest.mark.large("other models, dtypes and tensor ranks; the small tier draws one with every quantized tensor")
MASK = np.uint64(0xFFFFFFFF)


def hashed(x: np.ndarray) -> np.ndarray:
    mixed = x.view(np.uint32).astype(np.uint64) * np.uint64(0x9E3779B1)
    mixed = (mixed + np.arange(x.size, dtype=np.uint64) * np.uint64(0x85EBCA6B)) & MASK
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = ((mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)) & MASK
    mixed ^= mixed >> np.uint64(15)
    return (mixed >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


def bfloat16(x: np.float32, *, outward: bool) -> np.float32:
    """A number with the last 16 bits of its float32 gone: rounded away from zero, or towards it."""
    bits = int(np.float32(x).view(np.uint32))
    return np.uint32((bits + 0xFFFF if outward else bits) & 0xFFFF0000).view(np.float32)


def reference(x: np.ndarray, bits: int) -> np.ndarray:
    """What comes back of a flat array in float32."""
    most, out = np.float32(2**bits - 1), np.empty_like(x)
    whole = np.concatenate((x, np.zeros(-x.size % GROUP, np.float32)))
    chance = hashed(whole)
    for start in range(0, x.size, GROUP):
        group = whole[start : start + GROUP]
        least = bfloat16(group.min(), outward=bool(group.min() < 0))
        step = bfloat16((group.max() - least) / most, outward=True)
        scaled = (group - least) / (step if step > 0 else np.float32(1))
        code = np.clip(np.floor(scaled + chance[start : start + GROUP]), 0, most)
        part = out[start : start + GROUP]
        part[:] = (code * step + least)[: part.size]
    return out


@pytest.mark.drawn(group="kernels")
def test_the_kernels_give_the_bits_of_plain_operations(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("group_bits_kernels.py"))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_it_is_what_numpy_makes_of_it(bits: int) -> None:
    generator = np.random.default_rng(bits)
    for size in (1, 63, 64, 1000, 5000):
        x = (generator.standard_normal(size) * 10.0 ** generator.integers(-3, 2, size)).astype(np.float32)
        codes, ranges = quantized_activations.quantize(torch.from_numpy(x), bits)
        assert codes.nbytes + ranges.nbytes == quantized_bytes(size, bits)
        back = quantized_activations.dequantize(codes, ranges, bits=bits, numel=size, dtype=torch.float32)
        np.testing.assert_array_equal(back.numpy(), reference(x, bits))


def test_pieces_are_quantized_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    whole = quantized_activations.quantize(x, 4)
    monkeypatch.setattr(quantized_activations, "AT_ONCE", 512)
    for one, other in zip(whole, quantized_activations.quantize(x, 4), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(
        quantized_activations.dequantize(*whole, bits=4, numel=3000, dtype=torch.float32),
        torch.from_numpy(reference(x.numpy(), 4)),
    )


def test_its_mean_is_right_and_its_error_small() -> None:
    x = torch.rand(2**18, generator=torch.Generator().manual_seed(1))
    back = quantized_activations.dequantize(
        *quantized_activations.quantize(x, 2), bits=2, numel=x.numel(), dtype=torch.float32
    )
    error = back - x
    assert error.abs().max() <= 1 / 3 + 1e-6
    assert error.mean().abs() < 4 * error.std() / x.numel() ** 0.5  # four deviations of a mean of independent ones
    assert torch.corrcoef(torch.stack((error, x)))[0, 1].abs() < 0.01


def run_of(model: str, bits: int, layout: dict[str, Any], **train: Any) -> Run:
    plain = cases.make_run(model, layout, **cases.layers_for(layout) | train)
    return replace(plain, memory=replace(plain.memory, activation_bits=bits))


def measured(rank: int, run: Run) -> Any:
    return verify_rank(run, steps=1)


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [("dense", {}, "float32"), *(pytest.param(*each, marks=LARGE) for each in OTHERS)],
)
@pytest.mark.drawn(group="memory")
def test_layers_keep_the_bytes_of_the_plan(model: str, layout: dict[str, Any], dtype: str) -> None:
    verdict = verify_rank(run_of(model, 4, layout, dtype=dtype), steps=1)
    assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)
    plan, found = (memory.ranks[0]["activations"] for memory in (verdict.planned.memory, verdict.measured.memory))
    assert plan == found
    whole = verify_rank(run_of(model, 0, layout, dtype=dtype), steps=1).planned.memory.ranks[0]["activations"]
    assert found < whole


@LARGE
def test_tensor_ranks_agree_with_the_plan(ranks: RankPool) -> None:
    for verdict in ranks.run(2, measured, run_of("dense", 2, dict(tensor=2), dtype="bfloat16")):
        assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)


def test_gradients_are_near_and_nearer_with_more_bits() -> None:
    found = {}
    for bits in (0, 8, 4, 2):
        train_state = TrainState(run_of("dense", bits, {}, dtype="float32"))
        train_state.passes(cases.batch(0, True))
        gradients = [h.grad.flatten() for h in train_state.parallel.parameters if h.grad is not None]
        found[bits] = torch.cat(gradients)
    errors = [((found[bits] - found[0]).norm() / found[0].norm()).item() for bits in (8, 4, 2)]
    assert 0 < errors[0] < errors[1] < errors[2]
    assert errors[0] < 0.01
    assert errors[1] < 0.2
