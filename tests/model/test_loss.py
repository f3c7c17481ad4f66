"""The loss in chunks against the plain one, and its kernel against one operation after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_kernels import Interpreter

from shardwise.model.layers import Gemm
from shardwise.model.loss import IGNORE_INDEX, ChunkedCrossEntropy, LinearCrossEntropy, cross_entropy_and_grad_reference
from shardwise.run.derive import logit_columns


def case(rows: int, vocab: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * vocab)
    x = torch.randn(2, rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    targets = torch.randint(0, vocab, (2, rows))
    targets[torch.rand(2, rows) < 0.2] = IGNORE_INDEX
    return x, weight.requires_grad_(), targets


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(1, 9), st.integers(1, 4000))
def test_loss_and_gradients_are_those_of_the_plain_one(rows: int, vocab: int, width: int, chunk: int) -> None:
    x, weight, targets = case(rows, vocab, width, torch.float64)
    results = []
    for loss in (LinearCrossEntropy(), ChunkedCrossEntropy(chunk)):
        value = 0.37 * loss(x, weight, targets)
        results.append((value, *torch.autograd.grad(value, (x, weight))))
    for plain, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("makes", [False, True])
def test_gemms_of_logits_have_no_odd_width(makes: bool) -> None:
    # A GPU's GEMMs are six times slower with it, and GPT-2 has 50,257 tokens.
    seen: list[torch.Tensor] = []

    class Watched(Gemm):
        def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            seen.extend((left, right, product := super().multiply(left, right)))
            return product

        def put(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
            seen.extend((left, right, out))
            super().put(left, right, out, add)

    x, weight, targets = case(9, 67, 8, torch.bfloat16)
    head = ChunkedCrossEntropy(1300, Watched())
    head(x, weight, targets, make=torch.sum if makes else None).backward()
    assert weight.grad is not None
    assert weight.grad.shape == (67, 8)
    wide = [size for each in seen for size in each.shape if size > 18]  # more than there are tokens
    assert len(wide) >= 12  # two chunks or more: made, and multiplied twice
    assert set(wide) == {72, 64}  # and the other three rows of the matrix's gradient by themselves
    assert logit_columns(50257) == 50304


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(2, 70), st.integers(1, 4000))
def test_tokens_have_weights_where_they_are_given(rows: int, vocab: int, chunk: int) -> None:
    x, matrix, targets = case(rows, vocab, 5, torch.float64)
    weights = torch.rand(2, rows, dtype=torch.float64)
    terms = torch.nn.functional.cross_entropy((x @ matrix.mT).flatten(0, 1), targets.flatten(), reduction="none")
    want = (terms * weights.flatten()).sum()
    expected = (want, *torch.autograd.grad(want, (x, matrix)))
    for head in (LinearCrossEntropy(), ChunkedCrossEntropy(chunk)):
        value = head(x, matrix, targets, weights)
        for got, right in zip((value, *torch.autograd.grad(value, (x, matrix))), expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(2, 70), st.integers(1, 4000), st.sampled_from([0, 1, 3]))
def test_whatever_is_made_of_log_probabilities_has_their_gradient(rows: int, vocab: int, chunk: int, each: int) -> None:
    x, matrix, targets = case(rows, vocab, 5, torch.float64)
    if each:
        targets = torch.randint(0, vocab, (2, rows, each))

    def make(logprobs: torch.Tensor) -> torch.Tensor:
        assert logprobs.shape == targets.shape
        return (logprobs.sum(1) ** 2).sum() + logprobs[:, ::2].exp().sum()

    counted, index = targets != IGNORE_INDEX, targets.clamp(min=0)
    index = index if each else index[..., None]
    logprobs = (x @ matrix.mT).log_softmax(-1).gather(-1, index).view_as(targets) * counted
    want = 0.37 * make(logprobs)
    expected = (want, *torch.autograd.grad(want, (x, matrix)))
    for head in (LinearCrossEntropy(), ChunkedCrossEntropy(chunk)):
        value = 0.37 * head(x, matrix, targets, make=make)
        for got, right in zip((value, *torch.autograd.grad(value, (x, matrix))), expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-11)


def test_of_log_probabilities_only_the_input_and_two_numbers_a_token_are_saved() -> None:
    x, matrix, targets = case(50, 300, 8, torch.float64)
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ChunkedCrossEntropy(300 * 8 * 7)(x, matrix, targets, make=torch.sum)
    assert sorted(saved) == sorted([x.numel(), matrix.numel(), 100, 100])


def test_in_16_bits_it_is_no_further_off_than_the_plain_one() -> None:
    x, weight, targets = case(64, 300, 32, torch.bfloat16)
    exact = LinearCrossEntropy()(x.double(), weight.double(), targets)
    truth = torch.autograd.grad(exact, (x, weight))
    off = []
    for loss in (LinearCrossEntropy(), ChunkedCrossEntropy(300 * 2 * 10)):
        value = loss(x, weight, targets)
        gradients = torch.autograd.grad(value, (x, weight))
        assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32]
        assert value.item() == pytest.approx(exact.item(), rel=1e-2)
        off.append(
            [(g.double() - t.double()).norm() / t.double().norm() for g, t in zip(gradients, truth, strict=True)]
        )
    assert all(chunked < 1.2 * plain + 1e-3 for plain, chunked in zip(*off, strict=True))


@pytest.mark.parametrize("chunk", [2**20, 300 * 2 * 10])
def test_a_head_in_16_bits_has_its_gradient_in_16_bits_where_one_chunk_makes_it(chunk: int) -> None:
    x, weight, targets = case(64, 300, 32, torch.bfloat16)
    weight = weight.detach().bfloat16().requires_grad_()
    factor = torch.tensor(1 / 97)  # which 16 bits do not hold
    kept: list[torch.dtype] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = ChunkedCrossEntropy(chunk)(x, weight, targets)
    assert kept == [torch.bfloat16, torch.bfloat16 if chunk == 2**20 else torch.float32]
    (gradient,) = torch.autograd.grad(factor * value, weight)
    exact = factor.double() * LinearCrossEntropy()(x.double(), weight.double(), targets)
    (want,) = (g.double() for g in torch.autograd.grad(exact, weight))
    assert (gradient.double() - want).norm() < 2**-7 * want.norm()
    assert abs((gradient.double() * want).sum() / want.square().sum() - 1) < 1e-3


def test_without_gradients_nothing_is_made_but_the_loss() -> None:
    x, weight, targets = case(5, 11, 3, torch.float64)
    with torch.no_grad():
        value = ChunkedCrossEntropy(200)(x, weight, targets)
    assert value.grad_fn is None
    assert value.item() == pytest.approx(LinearCrossEntropy()(x, weight, targets).item())


@pytest.mark.drawn(group="kernels")
def test_the_kernel_does_what_plain_operations_do(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("loss_kernels.py"))


def test_gradients_of_scores_add_up_to_nothing() -> None:
    scores = torch.randn(7, 30, dtype=torch.float64)
    cross_entropy_and_grad_reference(scores, torch.arange(7))
    torch.testing.assert_close(scores.sum(-1), torch.zeros(7, dtype=torch.float64))
