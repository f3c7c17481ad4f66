"""Mixtures on a GPU: the kernels against one operation after the other, compiled against eager, twice against once, and no
wait of the host in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool
from torch import Tensor, nn

from shardwise.measure.verify import verify_rank
from shardwise.model.moe import layer as moe
from shardwise.model.moe.layer import Experts, MoE, grouped_gemm
from shardwise.model.moe.ops import combine_weighted, dispatch, sort_by_expert, topk_experts
from shardwise.model.moe.router_gemm import router_gemm
from shardwise.model.transformer import Block
from shardwise.run import ModelConfig, run_from_dict

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = dict(
    layers=1, hidden=256, heads=4, kv_heads=2, ffn=256, vocab=64, experts=8, experts_per_token=2, expert_ffn=128
)
SIGMOID = dict(router="sigmoid", router_normalize=True, router_scale=1.5, shared_experts=1)


def config_of(**more: Any) -> ModelConfig:
    return run_from_dict(dict(model=MODEL | more)).model


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.05)
    return module.cuda()


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What a module gives and the gradients of all it was given, for one gradient of its results."""
    torch.manual_seed(5)
    outs = module(x)
    total = sum((out.float() * torch.randn(out.shape, device="cuda")).sum() for out in outs)
    return [*(out.detach() for out in outs), *torch.autograd.grad(total, (x, *module.parameters()), allow_unused=True)]


@pytest.fixture
def tokens() -> Tensor:
    torch.manual_seed(7)
    return torch.randn(2, 512, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()


@pytest.fixture
def unheard() -> Iterator[Callable[[bool], None]]:
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1000, 2, 8, 2048), (333, 8, 160, 7168), (4096, 4, 60, 1000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_go_where_a_stable_sort_puts_them(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    count, k, kinds, width = shape
    torch.manual_seed(count)
    scores = torch.rand(count, kinds, device="cuda")
    chosen = topk_experts(scores, k)
    assert torch.equal(scores.gather(1, chosen), scores.topk(k).values)
    assert topk_experts(torch.full_like(scores, float("nan")), k).max() < kinds
    places, counts = sort_by_expert(chosen, kinds)
    order = chosen.flatten().argsort(stable=True)
    assert torch.equal(places.flatten().long(), order.argsort())
    assert torch.equal(counts, chosen.flatten().bincount(minlength=kinds))
    x = torch.randn(count, width, device="cuda", dtype=dtype, requires_grad=True)
    weights = torch.rand(count, k, device="cuda", requires_grad=True)
    rows = dispatch(x, places, count * k)
    assert torch.equal(rows, x[order // k])
    out = combine_weighted(rows, places, weights)
    want = x.double() * weights.double().sum(1, keepdim=True)
    given = torch.randn_like(x)
    for mine, true in zip(
        (out, *torch.autograd.grad(out, (x, weights), given)),
        (want, *torch.autograd.grad(want, (x, weights), given.double())),
        strict=True,
    ):
        torch.testing.assert_close(
            mine.double(), true.double(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2
        )


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_a_routers_product_is_nearly_as_exact_as_in_float32(wide: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, 2048, device="cuda").to(wide).requires_grad_()
    given = torch.randn(4096, 8, device="cuda")
    truth = x.double() @ weight.double().mT
    to_x, to_weight = given.double() @ weight.double(), given.double().mT @ x.double()
    mine, plain = router_gemm(x, weight.mT), x.float() @ weight.float().mT
    # Tensor cores drop a few bits as they add: some ten times float32's rounding on an H200, a thousandth of bfloat16's.
    assert (mine - truth).norm() < 1e-5 * truth.norm()
    assert (plain - truth).norm() < 1e-5 * truth.norm()
    got = torch.autograd.grad(mine, (x, weight), given)
    assert (got[0].double() - to_x).norm() < 1.02 * (to_x.bfloat16().double() - to_x).norm()
    if wide == torch.float32:
        assert (got[1].double() - to_weight).norm() < 1e-5 * to_weight.norm()


@pytest.mark.parametrize("more", [{}, SIGMOID, dict(expert_capacity=0.6)], ids=str)
def test_kernels_are_no_further_off_than_plain_operations(
    monkeypatch: pytest.MonkeyPatch, tokens: Tensor, more: dict[str, Any]
) -> None:
    mixture = filled(MoE(config_of(**more)))
    assert isinstance(mixture, MoE)
    weights, chosen, _ = (part.detach() for part in mixture.router(tokens))
    mixture.router.forward = lambda x: (
        weights.to(x.dtype),
        chosen,
        weights[0, 0, :2].to(x.dtype),
    )  # the same choices for all
    fused = gradients(mixture, tokens)
    for name in ("has_fused_kernels", "multiplies"):
        monkeypatch.setattr(moe, name, lambda x: False)
    plain = gradients(mixture, tokens)
    exact = gradients(mixture.double(), tokens.detach().double().requires_grad_())
    for one, other, truth in zip(fused, plain, exact, strict=True):
        if truth is not None:
            scale = truth.norm() + 1e-9
            assert (one - truth).norm() / scale < 1.3 * (other - truth).norm() / scale + 1e-3


@pytest.mark.parametrize("more", [{}, SIGMOID, dict(expert_capacity=0.6)], ids=str)
def test_a_compiled_mixture_gives_the_same(tokens: Tensor, more: dict[str, Any]) -> None:
    mixture = filled(MoE(config_of(**more)))
    eager = gradients(mixture, tokens)
    mixture.forward = torch.compile(mixture.forward, fullgraph=True)
    for one, other in zip(eager, gradients(mixture, tokens), strict=True):
        assert one is other is None or (other - one).norm() <= 0.01 * one.norm()


def test_a_compiled_block_is_one_graph(tokens: Tensor) -> None:
    block = filled(Block(config_of(position="learned"), 0))
    inner, compiled = block.forward, torch.compile(block.forward, fullgraph=True)
    results = []
    for forward in (inner, compiled):
        block.forward = lambda x, forward=forward: forward(x, None, None)
        results.append(gradients(block, tokens))
    for one, other in zip(*results, strict=True):
        # Rounded elsewhere, some tokens choose another expert.
        assert one is other is None or (other - one).norm() <= 0.3 * one.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("more", [{}, SIGMOID, dict(expert_capacity=0.6)], ids=str)
def test_the_host_never_waits_for_the_router(
    tokens: Tensor, more: dict[str, Any], compiled: bool, unheard: Callable[[bool], None]
) -> None:
    mixture = filled(MoE(config_of(**more)))
    if compiled:
        mixture.forward = torch.compile(mixture.forward)
    first = gradients(mixture, tokens)
    unheard(True)
    again = gradients(mixture, tokens)
    unheard(False)
    for one, other in zip(first, again, strict=True):
        assert one is other is None or torch.equal(one, other)  # to the bit, too


def test_products_of_experts_copy_no_weights() -> None:
    rows, wide, deep = 4096, 1024, 2048
    x = torch.randn(rows, deep, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, wide, deep, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.arange(rows // 8, rows + 1, rows // 8, device="cuda", dtype=torch.int32)
    given = torch.randn(rows, wide, device="cuda", dtype=torch.bfloat16)
    grouped_gemm(x, weight, ends).backward(given)  # workspaces
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grouped_gemm(x, weight, ends).backward(given)
    results = 2 * (rows * wide + rows * deep + weight.numel())
    assert torch.cuda.max_memory_allocated() - before < results + weight.numel()  # half of a copy of the weights


def test_rows_that_are_nobodys_change_nothing() -> None:
    """Experts get as many rows as there could be, and the device alone knows how many there are."""
    mine = filled(Experts(config_of()))
    counts = torch.tensor([3, 0, 50, 1, 0, 7, 20, 2], device="cuda")
    rows = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    rows[83:] = float("nan")
    results = []
    for some in (rows, rows[:83].clone()):
        leaf = some.requires_grad_()
        out = mine(leaf, counts)
        results.append((out[:83], *torch.autograd.grad(out[:83].float().square().sum(), tuple(mine.parameters()))))
    for with_rest, alone in zip(*results, strict=True):
        torch.testing.assert_close(with_rest, alone, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", ["mixture", "softmax"])
def test_a_step_does_and_keeps_what_the_plan_says(model: str, dtype: str) -> None:
    run = cases.make_run(model, {}, layers=2, device="cuda", dtype=dtype, loss="plain")
    differences = verify_rank(run, steps=1).differences()
    assert not [d for d in differences if d.account == "work" and abs(d.relative) > 1e-9]
    assert not [d for d in differences if d.account == "memory" and abs(d.relative) > 1e-2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["mixture", "capacity"])
def test_experts_on_ranks_that_share_a_gpu_follow_the_cpu(ranks: RankPool, model: str, dtype: str) -> None:
    want = cases.train(0, cases.make_run(model, {}, lr=1e-3))
    run = cases.make_run(model, dict(shard=2, expert=2), device="cuda", dtype=dtype, lr=1e-3)
    for got in ranks.run(2, cases.train, run):
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-4 if dtype == "float32" else 1e-2)
