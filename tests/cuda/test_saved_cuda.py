"""What layers save on a GPU, dropped and recomputed, or on the host: the same bits, and the bytes of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.measure.verify import TOLERANCE, random_batch, verify_rank
from shardwise.parallel.activations import quantized as quantized_activations
from shardwise.run import Run, run_from_dict
from shardwise.train.step import TrainState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPTIMAL = dict(recompute="optimal", recompute_budget=1e-6)


def run_of(layout: dict[str, Any], memory: dict[str, Any]) -> Run:
    model = dict(layers=4, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512)
    train = dict(
        seq_len=256, global_batch=4, microbatch=2, dtype="bfloat16", device="cuda", compile=False, deterministic=True
    )
    return run_from_dict(dict(model=model, layout=layout, train=train, memory=memory))


def trained(run: Run) -> list[torch.Tensor]:
    train_state = TrainState(run)
    losses = [train_state.train_step(random_batch(run, n)).loss.cpu() for n in range(3)]
    return [*losses, *(h.parameter.detach().cpu() for h in train_state.parallel.parameters)]


@pytest.mark.parametrize(
    ("layout", "memory"),
    [(OPTIMAL, {}), ({}, dict(activations="host")), (OPTIMAL, dict(activations="host"))],
    ids=["recompute", "host", "either"],
)
def test_it_is_the_same_bits_and_the_bytes_of_the_plan(layout: dict[str, Any], memory: dict[str, Any]) -> None:
    run = run_of(layout, memory)
    for one, other in zip(trained(run), trained(run_of({}, {})), strict=True):
        assert torch.equal(one, other)
    verdict = verify_rank(run, steps=1)
    assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_tensors_are_the_cpus(bits: int, dtype: torch.dtype) -> None:
    """Bit for bit: the kernels fuse no product with a sum, and divide as plain operations do."""
    x = (torch.randn(100_001, generator=torch.Generator().manual_seed(bits)) * 3).to(dtype)
    there = quantized_activations.quantize(x.cuda(), bits)
    here = quantized_activations.quantize(x, bits)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there, here, strict=True))
    told = dict(bits=bits, numel=x.numel(), dtype=dtype)
    assert torch.equal(
        quantized_activations.dequantize(*there, **told).cpu(), quantized_activations.dequantize(*here, **told)
    )
