"""What `test_moe_ops.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: the kernels against
one operation after the other, for any number of tokens, choices and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.model.moe import layer as moe
from shardwise.model.moe.layer import MoE
from shardwise.model.moe.ops import combine, combine_weighted, dispatch, sort_by_expert, topk_experts
from shardwise.run import run_from_dict

SLOW = settings(max_examples=5, deadline=None, database=None, derandomize=True)


@st.composite
def choices(draw: Any) -> tuple[Tensor, int]:
    """Choices [tokens, k] among experts, of which some may get nothing and one may get all; and the number of experts."""
    kinds = draw(st.integers(1, 40))
    tokens, k = draw(st.integers(1, 9)), draw(st.integers(1, min(3, kinds)))
    flat = st.lists(st.integers(0, kinds - 1), min_size=tokens * k, max_size=tokens * k)
    return torch.tensor(draw(flat | st.just([kinds - 1] * (tokens * k)))).view(tokens, k), kinds


@SLOW
@given(choices())
def places_are_those_of_a_stable_sort(case: tuple[Tensor, int]) -> None:
    chosen, kinds = case
    places, counts = sort_by_expert(chosen, kinds)
    assert torch.equal(places.flatten().long(), chosen.flatten().argsort(stable=True).argsort())
    assert torch.equal(counts, chosen.flatten().bincount(minlength=kinds))


def choices_of_nobody_have_no_place() -> None:
    chosen = torch.tensor([[0, 3], [3, 3], [2, 0]])
    places, counts = sort_by_expert(chosen, 3)
    assert places.tolist() == [[0, -1], [-1, -1], [2, 1]]
    assert counts.tolist() == [2, 0, 1]


@SLOW
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 4))
def the_best_experts_have_the_highest_scores(tokens: int, kinds: int, k: int) -> None:
    k = min(k, kinds)
    scores = torch.rand(1, tokens, kinds, generator=torch.Generator().manual_seed(tokens))
    scores[:, :, : kinds - k] = scores[:, :, : kinds - k].masked_fill(scores[:, :, : kinds - k] > 0.9, float("-inf"))
    assert torch.equal(topk_experts(scores, k), scores.topk(k).indices)
    assert topk_experts(torch.zeros(tokens, kinds), k).tolist() == [list(range(k))] * tokens
    assert topk_experts(torch.full((tokens, kinds), float("nan")), k).max() < kinds


def many_blocks_are_one_sort() -> None:
    chosen = torch.randint(
        0, 300, (70, 4), generator=torch.Generator().manual_seed(1)
    )  # blocks of 32 for so many experts
    places, _ = sort_by_expert(chosen, 300)
    assert torch.equal(places.flatten().long(), chosen.flatten().argsort(stable=True).argsort())


@SLOW
@given(choices(), st.sampled_from([1, 5, 64]), st.sampled_from([torch.float32, torch.bfloat16]))
def rows_and_gradients_are_those_of_plain_operations(case: tuple[Tensor, int], width: int, dtype: torch.dtype) -> None:
    chosen, kinds = case
    (tokens, k), rows = chosen.shape, chosen.numel()
    torch.manual_seed(rows)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weights = torch.rand(tokens, k, requires_grad=True)
    places, _ = sort_by_expert(chosen, kinds)
    order = chosen.flatten().argsort(stable=True)
    factors = torch.randn(rows, width, dtype=dtype)
    laid = dispatch(x, places, rows)
    assert torch.equal(laid, x[order // k])
    wide, exact = (leaf.detach().double().requires_grad_() for leaf in (x, weights))
    done = (wide[order // k] * factors.double())[order.argsort()].view(tokens, k, width)
    for mine, true, leaves, theirs in (
        (
            combine_weighted(laid * factors, places, weights),
            (done * exact[..., None]).sum(1),
            (x, weights),
            (wide, exact),
        ),
        (combine(laid * factors, places), done.sum(1), (x,), (wide,)),
    ):
        given_back = torch.randn_like(mine)
        got = torch.autograd.grad(mine, leaves, given_back, retain_graph=True)
        want = torch.autograd.grad(true, theirs, given_back.double(), retain_graph=True)
        for one, other in zip((mine, *got), (true, *want), strict=True):
            near = dict(rtol=0.03, atol=0.05) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(one.double(), other, **near)


def a_mixture_is_the_plain_one() -> None:
    """With a capacity and without, in float32; and twice the same to the bit."""
    model = dict(layers=1, hidden=16, heads=2, ffn=16, vocab=8, experts=4, experts_per_token=2, expert_ffn=8)
    for capacity in (0.0, 0.7):
        mixture = MoE(replace(run_from_dict(dict(model=model)).model, expert_capacity=capacity))
        torch.manual_seed(2)
        for parameter in mixture.parameters():
            torch.nn.init.normal_(parameter)
        x = torch.randn(2, 7, 16, requires_grad=True)
        results = []
        for fused in (False, True, True):
            moe.has_fused_kernels = lambda x, fused=fused: fused  # type: ignore[assignment]
            out, auxiliary = mixture(x)
            leaves = (x, *mixture.parameters())
            results.append((out, *torch.autograd.grad(out.square().sum() + auxiliary.sum(), leaves)))
        for plain, fused, again in zip(*results, strict=True):
            torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
            assert torch.equal(fused, again)


if __name__ == "__main__":
    torch.set_num_threads(1)
    places_are_those_of_a_stable_sort()
    choices_of_nobody_have_no_place()
    many_blocks_are_one_sort()
    the_best_experts_have_the_highest_scores()
    rows_and_gradients_are_those_of_plain_operations()
    a_mixture_is_the_plain_one()
