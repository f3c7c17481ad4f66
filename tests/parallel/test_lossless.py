"""What is saved without loss in fewer bytes: the same bits of training, and the bytes of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool

from shardwise.measure.verify import TOLERANCE, verify_rank
from shardwise.model.adapters import packed_bits, unpacked_bits, without_a_share
from shardwise.run import Run

LARGE = pytest.mark.large("tensor ranks and a pipeline beside; the small tier has one rank in two dtypes")


def run_of(activation: str, lossless: bool, layout: dict[str, Any], **train: Any) -> Run:
    plain = cases.make_run("tied", layout, **cases.layers_for(layout) | train)
    model = replace(plain.model, activation=activation)  # type: ignore[arg-type]
    return replace(plain, model=model, memory=replace(plain.memory, lossless=lossless))


def trained_and_measured(rank: int, run: Run) -> tuple[dict[str, Any], Any]:
    return cases.train(rank, run), verify_rank(run, steps=1)


def saved_bytes(verdict: Any) -> float:
    """Bytes of saved activations, planned and found alike."""
    assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)
    plan, found = (memory.ranks[0]["activations"] for memory in (verdict.planned.memory, verdict.measured.memory))
    assert plan == found
    return found


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ({}, "float64"),
        ({}, "bfloat16"),
        pytest.param(dict(tensor=2, shard=2), "float64", marks=LARGE),
        pytest.param(dict(pipeline=2), "float64", marks=LARGE),
    ],
    ids=str,
)
@pytest.mark.drawn(1)
def test_a_square_is_made_of_its_root_bit_for_bit(ranks: RankPool, layout: dict[str, Any], dtype: str) -> None:
    runs = [run_of("relu2", lossless, layout, dtype=dtype, steps=2) for lossless in (False, True)]
    plain, lossless = (ranks.run(run.layout.world, trained_and_measured, run) for run in runs)
    for (one, before), (other, after) in zip(plain, lossless, strict=True):
        for key in ("losses", "norms", "evaluated"):
            assert one[key] == other[key]
        for name, (_, values) in one["parameters"].items():
            assert np.array_equal(values, other["parameters"][name][1]), name
        run = runs[0]
        tokens, width = run.train.microbatch * run.train.seq_len, dict(float64=8, bfloat16=2)[dtype]
        inner = tokens * run.model.ffn // run.layout.tensor * width * run.model.layers // run.layout.pipeline
        flying = (saved_bytes(before) - saved_bytes(after)) / inner
        assert flying == (1 if run.layout.pipeline == 1 else pytest.approx(2, abs=1))
        assert flying > 0


@pytest.mark.drawn(group="memory")
def test_relu_saves_one_tensor_for_itself_and_for_the_matrix_behind_it() -> None:
    """So a mask of its signs, which is all that its own gradient needs, would come on top."""
    one, two = (
        saved_bytes(verify_rank(run_of(name, False, {}, dtype="float32"), steps=1)) for name in ("relu", "relu2")
    )
    run = run_of("relu", False, {}, dtype="float32")
    assert two - one == run.train.microbatch * run.train.seq_len * run.model.ffn * 4 * run.model.layers


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_bits_are_packed_eight_to_a_byte(count: int) -> None:
    mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) > 0.3
    bits = packed_bits(mask)
    assert bits.numpy().tobytes() == np.packbits(mask.numpy(), bitorder="little").tobytes()
    assert torch.equal(unpacked_bits(bits, count), mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dropout_saves_a_bit_of_each_element_and_has_the_gradient_of_a_product(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 37, dtype=dtype, requires_grad=True)
    keys, columns = torch.arange(15).view(3, 5) * 7919, torch.arange(37)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = without_a_share(x, keys, columns, 0.3)
    assert [tensor.nbytes for tensor in saved] == [-(-x.numel() // 8)]
    factor = torch.where(out == 0, 0.0, 1 / (1 - 0.3)).to(dtype)
    assert torch.equal(out, x.detach() * factor)
    assert 0 < (out == 0).float().mean() < 0.6
    grad = torch.randn_like(out)
    out.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, grad * factor)
