"""Attention over pages is attention, whatever the pages; the kernels for GPUs against it, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreted_kernels import Interpreter

from shardwise.model.paged import PagedBatch, PagedCache
from shardwise.run import ModelConfig
from shardwise.run.derive import derive_model


@pytest.mark.parametrize("what", ["attention", "latent", "gemm", "cut"])
@pytest.mark.drawn(group="kernels")
def test_the_kernels(what: str, interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("serving_kernels.py"), what)


def test_pages_are_copied_whole() -> None:
    config = derive_model(ModelConfig(layers=2, hidden=32, heads=4, vocab=40), 32)
    cache = PagedCache(config, 2, 5, 4, torch.float32, torch.device("cpu"))
    for tensor in cache.tensors():
        tensor.normal_()
    before = [tensor.clone() for tensor in cache.tensors()]
    cache.copy(torch.tensor([1, 2]), torch.tensor([3, 4]))
    for old, new in zip(before, cache.tensors(), strict=True):
        assert torch.equal(new[[1, 2, 3, 4]], old[[1, 2, 1, 2]])
    assert len(before) == 4


def test_latents_are_kept_once() -> None:
    latent = dict(attention="latent", kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12)
    config = derive_model(ModelConfig(layers=2, hidden=32, heads=4, vocab=40, **latent), 32)
    cache = PagedCache(config, 2, 5, 4, torch.float32, torch.device("cpu"))
    assert [tuple(tensor.shape) for tensor in cache.tensors()] == [(5, 1, 4, 24)] * 2


def test_tokens_go_where_the_table_says() -> None:
    table = torch.tensor([[0, 0, 0], [7, 3, 9], [2, 5, 0]], dtype=torch.int32)
    batch = PagedBatch(
        table, torch.tensor([2, 1], dtype=torch.int32), torch.tensor([5, 2], dtype=torch.int32),
        torch.tensor([0, 1, 4], dtype=torch.int32), 1, (3,), 6, torch.tensor([5, 2, 3, 4], dtype=torch.int32),
    )  # fmt: skip
    assert batch.places(4).tolist() == [5 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 3 * 4]
