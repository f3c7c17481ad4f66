"""The profiler of any module against closed forms, published counts and this project's own plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

import shardwise
from shardwise.measure.profiler.formulas import varlen_flops
from shardwise.model.loss import LinearCrossEntropy
from shardwise.model.transformer import Transformer
from shardwise.plan.cost.flops import forward_flops, parameters
from shardwise.plan.trainer.work import work
from shardwise.run import run_from_dict


def convolution(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outer), nn.ReLU()
    )


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(inner, width, 1), convolution(width, width, 3, stride), convolution(width, 4 * width, 1)
        )
        self.short = convolution(inner, 4 * width, 1, stride) if stride > 1 or inner != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def resnet50() -> nn.Module:
    """He et al. 2015, with the stride in the 3x3 convolution, as torchvision has it."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inner = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for n in range(count):
            layers.append(Bottleneck(inner, width, stride if n == 0 else 1))
            inner = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


@pytest.mark.drawn(group="profiles")
def test_resnet_50_has_4_09_gmacs() -> None:
    with torch.device("meta"):
        model, x = resnet50(), torch.empty(1, 3, 224, 224)
        with shardwise.profile(model) as p:
            model(x).sum().backward()
    assert p.parameters == 25_557_032
    assert p.macs == 4_089_184_256  # torchvision publishes 4.089
    # All but the first convolution give a gradient to their input, and all to their weight.
    assert p.backward_flops == 2 * p.forward_flops - 2 * 112 * 112 * 64 * 3 * 49
    assert not p.not_counted


@pytest.mark.parametrize("name", ["dense", "tied", "latent", "parallel", "window", "mixture", "softmax"])
def test_our_models_cost_what_the_plan_says(name: str) -> None:
    """The whole model, and each part by pass, to the last operation."""
    run = run_from_dict(
        dict(model=cases.model_of(name), train=dict(seq_len=32, global_batch=2, microbatch=2, dtype="float64"))
    )
    torch.manual_seed(0)
    model = Transformer(run.model).double()
    tokens, targets = torch.randint(0, 61, (2, 2, 32))
    head = LinearCrossEntropy()
    with shardwise.profile(model) as p:
        out = model(tokens, finish=lambda hidden, unembedding: head(hidden, unembedding, targets))
        (out.result if out.auxiliary is None else out.result + out.auxiliary.sum()).backward()
    assert p.parameters == parameters(run.model).total
    assert p.forward_flops == pytest.approx(64 * forward_flops(run.model, 32), rel=1e-12)
    assert p.backward_flops == pytest.approx(2 * p.forward_flops, rel=1e-12)
    planned = work(run).flops
    for part, words in {"attention": ("attention",), "ffn": ("ffn", "shared"), "experts": ("experts",)}.items():
        mine = [node.own.flops for node in p.modules if _part(node.name) in words]
        if part not in planned:
            continue
        assert sum(flops.get("forward", 0) for flops in mine) == pytest.approx(planned[part]["forward"], rel=1e-12)
        backward = planned[part]["backward_input"] + planned[part].get("backward_weight", 0.0)
        assert sum(flops.get("backward", 0) for flops in mine) == pytest.approx(backward, rel=1e-12)


def _part(name: str) -> str:
    words = name.split(".")
    return next((word for word in ("router", "experts", "attention", "shared", "ffn", "head") if word in words), "")


class Attention(nn.Module):
    def __init__(self, how: str = "", heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out, self.how, self.heads = nn.Linear(16, 48), nn.Linear(16, 16), how, heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mask = None
        if self.how == "bool mask":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
        elif self.how == "added mask":
            mask = torch.full((length, length), -torch.inf).triu(1)
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.how == "causal")
        return self.out(attended.transpose(1, 2).reshape(rows, length, width))


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("how", ["", "causal", "bool mask", "added mask"])
def test_attention_counts_its_pairs_whatever_computes_it(how: str, kernel: SDPBackend) -> None:
    model, x = Attention(how), torch.randn(3, 10, 16)
    with sdpa_kernel(kernel), shardwise.profile(model) as p:
        model(x).sum().backward()
    (whole,) = (node.own for node in p.modules if node.name == "")
    pairs = 3 * 2 * (55 if how else 100)
    assert whole.flops["forward"] == pairs * 2 * (8 + 8)
    assert whole.flops["backward"] == 2 * whole.flops["forward"]
    again = whole.flops.get("recompute_in_kernels", 0.0)
    assert again == (whole.flops["forward"] / 2 if kernel is SDPBackend.FLASH_ATTENTION else 0.0)
    linear = 3 * 10 * 16 * (48 + 16) * 2
    assert p.forward_flops == whole.flops["forward"] + linear
    assert p.backward_flops == 2 * whole.flops["forward"] + 2 * linear - 3 * 10 * 16 * 48 * 2  # x has no gradient


@given(st.integers(0, 9), st.integers(0, 9), st.one_of(st.none(), st.integers(-1, 9)), st.booleans())
def test_varlen_attention_counts_the_pairs_of_its_mask(
    queries: int, keys: int, window: int | None, causal: bool
) -> None:
    """The last query is aligned with the last key, as where one token is decoded behind others."""
    q, k, v = torch.empty(queries, 2, 8), torch.empty(keys, 2, 8), torch.empty(keys, 2, 4)
    ends_q, ends_k = (torch.tensor([0, 0, length]) for length in (queries, keys))
    arguments = dict(query=q, key=k, value=v, cum_seq_q=ends_q, cum_seq_k=ends_k, is_causal=causal)
    at, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = (key <= at) & (key >= at - (keys if window is None or window < 0 else window))
    pairs = seen.sum() if causal else queries * keys
    assert varlen_flops(arguments | dict(window_size_left=window)) == pairs * 2 * 2 * (8 + 4)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(Attention("causal") for _ in range(2)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_counted_apart(reentrant: bool, kernel: SDPBackend) -> None:
    x = torch.randn(3, 10, 16, requires_grad=True)
    plain, model = nn.ModuleList(Attention("causal") for _ in range(2)), Checkpointed(reentrant)
    with sdpa_kernel(kernel), shardwise.profile(plain) as without:
        (x + plain[0](x) + plain[1](x)).sum().backward()
    with sdpa_kernel(kernel), shardwise.profile(model) as p:
        model(x).sum().backward()
    assert (p.forward_flops, p.backward_flops) == (without.forward_flops, without.backward_flops)
    by_name = {node.name: node for node in p.modules}
    # Without reentrance it stops as soon as everything saved is there again: the last product saves nothing.
    assert by_name["blocks.0.qkv"].own.flops["recompute"] == by_name["blocks.0.qkv"].own.flops["forward"]
    assert by_name["blocks.1"].own.flops["recompute"] == by_name["blocks.1"].own.flops["forward"]
    assert ("recompute" in by_name["blocks.0.out"].own.flops) is reentrant
    assert p.activations == 2 * x.nbytes  # the blocks' inputs: the sum saves nothing
    assert by_name["blocks.0.qkv"].calls == 1


class Square(torch.autograd.Function):
    """A custom function whose products autograd cannot see."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x @ weight @ weight

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _, weight = context.saved_tensors
        return grad @ weight.T @ weight.T, None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x, self.weight)


def recurrent(kind: type[nn.Module], gates: int) -> tuple[nn.Module, tuple[int, ...], float]:
    return kind(8, 16), (5, 3, 8), 2.0 * 15 * gates * (8 * 16 + 16 * 16)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...], float]]] = {
    "linear": lambda: (nn.Linear(8, 12), (2, 5, 8), 2.0 * 10 * 8 * 12),
    "grouped convolution": lambda: (nn.Conv2d(8, 16, 3, groups=4, padding=1), (2, 8, 6, 6), 2.0 * 2 * 36 * 16 * 2 * 9),
    "strided": lambda: (nn.Conv1d(4, 6, 3, stride=2), (2, 4, 9), 2.0 * 2 * 4 * 6 * 4 * 3),
    "transposed": lambda: (nn.ConvTranspose2d(8, 4, 3, stride=2), (2, 8, 5, 5), 2.0 * 2 * 25 * 8 * 4 * 9),
    "three dimensions": lambda: (nn.Conv3d(2, 4, (1, 3, 3)), (1, 2, 4, 5, 5), 2.0 * 4 * 9 * 4 * 2 * 9),
    "lstm": lambda: recurrent(nn.LSTM, 4),
    "gru": lambda: recurrent(nn.GRU, 3),
    "multihead": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), (2, 10, 16),
        2.0 * 20 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 100 * 2 * (8 + 8)),
    "custom function": lambda: (Custom(), (4, 8), 2.0 * 2 * 4 * 64),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_closed_forms(name: str) -> None:
    model, shape, forward = CASES[name]()
    x = torch.randn(shape, requires_grad=True)
    with shardwise.profile(model) as p:
        out = model(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert p.forward_flops == forward
    # The first hidden state of a recurrent layer is given, and needs no gradient.
    given = 2.0 * 3 * model.weight_hh_l0.numel() if isinstance(model, nn.RNNBase) else 0.0
    if name == "lstm":  # oneDNN's, which some CPUs get, makes that gradient all the same
        assert p.backward_flops in (2 * forward, 2 * forward - given)
    else:
        assert p.backward_flops == (forward if name == "custom function" else 2 * forward - given)
    assert {node.name for node in p.modules if node.own.flops} <= {name for name, _ in model.named_modules()}
    with torch.no_grad(), shardwise.profile(model.eval()) as inference:
        model(x)
    assert inference.forward_flops == forward
    assert not inference.backward_flops
    assert not inference.activations


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight, offs=ends)


def test_grouped_products_count_the_rows_that_belong_to_a_group() -> None:
    model, x = Grouped(), torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    with shardwise.profile(model) as p:
        model(x, torch.tensor([8, 16, 32], dtype=torch.int32)).square().sum().backward()
    assert p.forward_flops == 2 * 32 * 16 * 32
    assert p.backward_flops == 2 * p.forward_flops


@torch.library.custom_op("profiled::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return twice(x)


def test_an_operator_without_a_formula_is_named_and_can_be_given_one() -> None:
    model, x = Twice(), torch.ones(6)
    with shardwise.profile(model) as p:
        model(x)
    assert p.not_counted == {"profiled::twice": 1}
    assert "profiled::twice (1×)" in repr(p)

    @register_flop_formula(torch.ops.profiled.twice)
    def flops(shape: Any, *_: Any, **keys: Any) -> int:
        return 3 * shape[0]

    with shardwise.profile(model) as p:
        model(x)
    assert p.flops == 18
    assert not p.not_counted


@pytest.mark.drawn(group="profiles")
def test_transformers_models_as_they_are() -> None:
    """A tiny Llama of `transformers`: the products of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2)  # fmt: skip
    model, tokens = LlamaForCausalLM(config), torch.randint(0, 97, (2, 16))
    with shardwise.profile(model) as p:
        model(tokens, labels=tokens).loss.backward()
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    pairs = 2 * 4 * 16 * 17 / 2
    products = 2 * 32 * (3 * layer + 32 * 97) + 3 * pairs * 2 * (8 + 8)
    frequencies = 2 * 2 * 4 * 16  # the angles of the rotary embedding are a product there
    assert p.forward_flops - products in (0, frequencies, frequencies / 2)
    assert p.backward_flops == 2 * products


def test_saved_activations_are_those_that_autograd_keeps() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(10, 8)
    with shardwise.profile(model) as p:
        model(x).sum().backward()
        model(x.clone()).sum().backward()
    # The input, for the first weight's gradient, and the output of the ReLU, which the second layer needs too.
    assert p.activations == 10 * 8 * 4 + 10 * 16 * 4


def test_time_is_divided_without_a_rest() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with shardwise.profile(model, peak=1e12) as p:
        for _ in range(3):
            model(torch.randn(32, 64)).sum().backward()
    roots = [node.whole for node in p.modules if node.name in ("", "(outside)")]
    assert sum(sum(cost.seconds.values()) for cost in roots) == pytest.approx(p.seconds)
    assert sum(sum(node.own.seconds.values()) for node in p.modules) == pytest.approx(p.seconds)
    assert p.mfu == pytest.approx(p.flops / p.seconds / 1e12)
    with shardwise.profile(model, time=False, memory=False) as p:
        model(torch.randn(32, 64))
    assert not p.seconds
    assert p.mfu is None


def test_nothing_is_left_behind() -> None:
    model, x = Attention("causal"), torch.randn(2, 6, 16)
    before = model(x)
    with pytest.raises(RuntimeError), shardwise.profile(model):
        model(torch.randn(2, 6, 15))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with shardwise.profile(model) as p:
        inside = model(x)
    assert torch.equal(before, inside)
    assert torch.equal(before, model(x))
    assert p.flops > 0


@pytest.mark.drawn(group="profiles")
def test_forms(tmp_path: Path) -> None:
    model = nn.ModuleDict({"layers": nn.Sequential(*(Attention("causal") for _ in range(3)))})
    with shardwise.profile(model) as p:
        model["layers"](torch.randn(2, 6, 16, requires_grad=True)).sum().backward()
    values = json.loads(p.to_json())
    assert values["flops"]["model"] == p.flops
    assert values["modules"][0]["flops"]["forward"] == p.forward_flops
    text = repr(p)
    assert "0-2" in text  # layers alike are one line
    assert "recomputation out" in text
    assert p.page().count("<tr") == len(p._table()) + 1
    frame = p.to_frame().set_index("module")
    assert frame.loc["layers.1.qkv", "flops_forward"] == 2 * 12 * 16 * 48
    p.to_tensorboard(tmp_path)
    assert list(tmp_path.glob("events*"))
