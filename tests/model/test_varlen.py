"""Attention inside of documents and windows: bounds against numbers and masks, whatever they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.measure.counts.work import varlen_pairs
from shardwise.model.attention import MaskBuilder
from shardwise.model.transformer import Transformer
from shardwise.model.varlen import VarlenMask, attention_mask, cu_seqlens_of, dense_mask, varlen_attention
from shardwise.run import run_from_dict
from shardwise.run.derive import uses_varlen_attention

CPU = torch.device("cpu")


def packed(rows: int, length: int, mean: int, seed: int) -> np.ndarray:
    """Documents that end at random places."""
    ends = np.random.default_rng(seed).random((rows, length)) < 1 / mean
    return ends.cumsum(axis=1).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 90), st.integers(1, 40), st.integers(0, 100), st.integers(0, 99))
def test_bounds_say_what_numbers_say(rows: int, length: int, mean: int, window: int, seed: int) -> None:
    documents = packed(rows, length, mean, seed)
    cu_seqlens = cu_seqlens_of(documents)
    count = len(cu_seqlens) - 1
    assert count & (count - 1) == 0
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == rows * length
    varlen = VarlenMask(torch.from_numpy(cu_seqlens), window)
    seen = dense_mask(varlen, rows, length, CPU)
    assert torch.equal(seen, attention_mask(length, torch.from_numpy(documents), window, CPU))
    assert varlen_pairs(varlen, rows, length) == seen.sum()


@pytest.mark.parametrize("window", [0, 1, 7, 100])
@pytest.mark.parametrize("mean", [0, 9])
def test_attention_and_gradients_are_those_of_a_mask(window: int, mean: int) -> None:
    torch.manual_seed(0)
    rows, length = 3, 40
    numbers = torch.from_numpy(packed(rows, length, mean, 0)) if mean else None
    cu_seqlens = torch.from_numpy(cu_seqlens_of(numbers.numpy())) if numbers is not None else None
    results = []
    for bounds in (True, False):
        torch.manual_seed(0)
        heads = [torch.randn(rows, length, n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
        if bounds:
            out = varlen_attention(*heads, VarlenMask(cu_seqlens, window), 0.3)  # type: ignore[arg-type]
        else:
            mask = attention_mask(length, numbers, window, CPU)
            q, k, v = (x.transpose(1, 2) for x in heads)
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
            out = out.transpose(1, 2)
        out.square().sum().backward()
        results.append((out, *(x.grad for x in heads)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_network_takes_either() -> None:
    shape = dict(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50, sliding_window=6)
    model = Transformer(run_from_dict(dict(model=shape)).model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens, numbers = torch.randint(0, 50, (2, 24)), packed(2, 24, 5, 0)
    with torch.no_grad():
        plain = model(tokens, documents=torch.from_numpy(numbers))[0]
        bounds = model(tokens, documents=torch.from_numpy(cu_seqlens_of(numbers)))[0]
    torch.testing.assert_close(bounds, plain)


def test_when_there_is_a_mask() -> None:
    numbers = torch.zeros(2, 16, dtype=torch.int32)
    for window, documents, kind in (
        (0, None, type(None)),
        (16, None, type(None)),
        (4, None, VarlenMask),
        (4, numbers, torch.Tensor),
        (0, torch.tensor([0, 16, 32]), VarlenMask),
    ):
        assert isinstance(MaskBuilder(window, varlen=True)(16, documents, CPU), kind)
    assert isinstance(MaskBuilder(4)(16, None, CPU), torch.Tensor)


@pytest.mark.parametrize(
    ("model", "train", "layout", "wanted"),
    [
        ({}, {}, {}, True),
        ({}, dict(dtype="float16"), {}, True),
        ({}, dict(dtype="float32"), {}, False),
        (dict(head_dim=12), {}, {}, False),
        ({}, {}, dict(context=2), False),
        ({}, {}, dict(tensor=2), True),
    ],
)
def test_when_attention_takes_bounds(model: dict, train: dict, layout: dict, wanted: bool) -> None:
    run = run_from_dict(dict(model=model, train=dict(dtype="bfloat16") | train, layout=layout))
    assert uses_varlen_attention(run, gpu=True) is wanted
    assert not uses_varlen_attention(run, gpu=False)
