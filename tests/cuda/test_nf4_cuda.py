"""The kernel that makes matrices of 4 bits, against its reference, and a step of a run that uses it."""

from __future__ import annotations

import pytest
import torch

from shardwise.measure.verify import random_batch
from shardwise.model.quantized.nf4 import dequantize, dequantize_reference, quantize
from shardwise.run import run_from_dict
from shardwise.train.step import TrainState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_gives_the_numbers_of_its_reference(double: bool, dtype: torch.dtype) -> None:
    whole = torch.randn(96, 4096, device="cuda", dtype=dtype)
    codes, absmax, scales = quantize(whole, double)
    assert torch.equal(
        dequantize(codes, absmax, scales, 0, 64, dtype), dequantize_reference(codes, absmax, scales, 0, 64, dtype)
    )
    part = codes[10:50, 64:].contiguous(), absmax[10:50, 2:].contiguous(), scales
    got, want = (make(*part, 10 * 64 + 2, 64, dtype) for make in (dequantize, dequantize_reference))
    assert torch.equal(got, want)


@pytest.mark.parametrize("double", [True, False])
def test_the_kernel_makes_stacks_of_matrices(double: bool) -> None:
    kept = quantize(torch.randn(3, 96, 1024, device="cuda"), double)
    part = kept.codes[:, 8:40, 64:].contiguous(), kept.absmax[:, 8:40, 2:].contiguous(), kept.scales
    got, want = (make(*part, 8 * 16 + 2, 16, torch.float32) for make in (dequantize, dequantize_reference))
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["lora", "qlora", "dora"])
def test_a_run_with_experts_learns(kind: str) -> None:
    model = dict(
        layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512, experts=4, experts_per_token=2, expert_ffn=256
    )
    train = dict(seq_len=256, global_batch=2, dtype="bfloat16", device="cuda", lr=1e-2)
    adapter = dict(kind=kind, rank=8, dropout=0.1 if kind == "lora" else 0.0)
    run = run_from_dict(dict(model=model, train=train, adapter=adapter))
    state, batch = TrainState(run), random_batch(run)
    losses = [state.train_step(batch).loss.item() for _ in range(12)]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_run_learns(kind: str) -> None:
    model = dict(layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512)
    train = dict(seq_len=256, global_batch=2, dtype="bfloat16", device="cuda", lr=1e-2)
    run = run_from_dict(dict(model=model, train=train, adapter=dict(kind=kind, rank=8)))
    state, batch = TrainState(run), random_batch(run)
    losses = [state.train_step(batch).loss.item() for _ in range(12)]
    assert losses[-1] < losses[0] - 0.05
