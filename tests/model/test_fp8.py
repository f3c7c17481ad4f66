"""Products in 8 bits: numbers come back within the format's error, kernels do what plain operations do, gradients are those of the
wide product to that error, one input is quantised once, and a model learns what it learns in 16 bits."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_kernels import Interpreter
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.data.batches import Batch
from shardwise.model.layers import Linear
from shardwise.model.quantized.formats import E4M3, E5M2, TOP
from shardwise.model.quantized.fp8 import GEMMS, Fp8Gemm, Fp8Matrix, use_fp8
from shardwise.model.quantized.scaled import (
    amax,
    cast,
    cast_reference,
    cast_rows,
    inverse,
    scale_of,
    scaled_mm_reference,
    transpose,
    transpose_reference,
)
from shardwise.model.transformer import Transformer
from shardwise.run import Run, UserError, run_from_dict
from shardwise.train.step import TrainState

HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""The most that rounding to nearest is off, as a share of the number: half of the last bit of the fraction."""
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
"""The smallest number above zero; below it the error is at most half of it."""


def numbers(rows: int, columns: int, power: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dispatch = torch.exp(2 * torch.randn(rows, columns, generator=generator))
    return torch.randn(rows, columns, generator=generator) * dispatch * 2.0**power


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([E4M3, E5M2]), st.floats(-110, 110), st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6)
)
def test_numbers_come_back_within_the_error_of_the_format(
    kind: torch.dtype, power: float, rows: int, columns: int, seed: int
) -> None:
    x = numbers(rows, columns, power, seed)
    eight, _, scale = cast(x, amax(x), kind, True, False)
    by_row, scales = cast_rows(x, kind)
    for got, by in ((eight, scale), (by_row, scales)):
        back = got.double() * by.double()
        allowed = HALF_STEP[kind] * x.double().abs() + SMALLEST[kind] / 2 * by.double()
        assert ((back - x.double()).abs() <= allowed).all()
        assert (torch.frexp(by).mantissa == 0.5).all(), "a scale is a power of two"


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_scales_are_the_smallest_powers_of_two_that_bring_the_largest_into_range(kind: torch.dtype) -> None:
    top = torch.finfo(kind).max
    assert top == 1.75 * 2.0 ** TOP[kind]
    sizes = torch.cat(
        [numbers(1, 500, power).abs()[0] for power in (-60, 0, 80)] + [top * 2.0 ** torch.arange(-9.0, 9)]
    )
    scale = scale_of(sizes, kind)
    assert (sizes / scale <= top).all()
    assert (sizes / (scale / 2) > top).all()
    assert torch.equal(inverse(scale) * scale, torch.ones_like(scale))


def test_nothing_and_what_is_not_finite() -> None:
    zero = cast(torch.zeros(16, 16), amax(torch.zeros(16, 16)), E4M3, True, True)
    assert not zero[0].float().any()
    assert not zero[1].float().any()
    assert 0 < zero[2] < 1
    for gemm in (kind() for kind in GEMMS.values()):
        weight = numbers(32, 16)
        assert not gemm(torch.zeros(16, 16), weight, None).any()
        for bad in (float("inf"), float("-inf"), float("nan")):
            x = numbers(16, 16)
            x[3, 5] = bad
            assert not gemm(x, weight, None)[3].isfinite().any()
            weight_bad = weight.clone()
            weight_bad[7, 2] = bad
            assert not gemm(numbers(16, 16), weight_bad, None)[:, 7].isfinite().any()


def test_turning_rows_changes_nothing_but_what_gets_too_small() -> None:
    x, scale = cast_rows(numbers(48, 80), E4M3)
    transposed, scales = transpose(x, scale)
    before, after = (x.double() * scale).mT, transposed.double() * scales
    assert ((before - after).abs() <= SMALLEST[E4M3] / 2 * scales).all()
    assert torch.equal(transposed.view(torch.uint8), transpose_reference(x, scale)[0].view(torch.uint8))


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# Errors of rounding are spread evenly up to half a step, which is between half of HALF_STEP and all of it: 0.72 of it on the
# way, over sqrt(3). A product's terms carry the errors of both operands, and the errors of its sum fall as the sum does.
def error(*kinds: torch.dtype) -> float:
    return 0.72 / 3**0.5 * sum(HALF_STEP[kind] ** 2 for kind in kinds) ** 0.5


@pytest.mark.parametrize("scaling", GEMMS)
@pytest.mark.parametrize("power", [-60, 0, 40])
def test_gradients_are_those_of_the_wide_product(scaling: str, power: int) -> None:
    torch.manual_seed(1)
    x = (torch.randn(4, 64, 128) * 2.0**power).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(96, 128, requires_grad=True)
    grad = torch.randn(4, 64, 96).to(torch.bfloat16) * 2.0**-20
    results = []
    for gemm in (GEMMS[scaling](), None):
        a, b = (t.detach().double() if gemm is None else t.detach() for t in (x, weight))
        a.requires_grad_(), b.requires_grad_()
        out = nn.functional.linear(a, b) if gemm is None else gemm(a, b, None)
        out.backward(grad.to(out.dtype))
        results.append((out.detach(), a.grad, b.grad))
    (out, dx, dw), wants = results
    assert (out.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    sixteen = 2.0**-9
    gradient = E5M2 if scaling == "tensorwise" else E4M3
    assert relative(out, wants[0]) < 1.2 * error(E4M3, E4M3) + sixteen
    assert relative(dx, wants[1]) < 1.2 * error(gradient, E4M3) + sixteen
    assert relative(dw, wants[2]) < (1.2 * error(E5M2, E4M3) if scaling == "tensorwise" else 0.0) + sixteen


@pytest.mark.parametrize("scaling", GEMMS)
def test_rows_of_very_different_size_need_a_scale_each(scaling: str) -> None:
    x = torch.randn(64, 64) * 2.0 ** torch.linspace(0, -30, 64)[:, None]
    out = GEMMS[scaling]()(x.to(torch.bfloat16), torch.eye(64), None)
    last = relative(out[-1], x[-1])
    assert last < 0.05 if scaling == "rowwise" else last == 1


def test_the_product_is_that_of_the_numbers_that_8_bits_stand_for() -> None:
    x, weight = numbers(32, 64, -3).to(torch.bfloat16), numbers(48, 64, 5)
    (a, a_scale), (b, b_scale) = cast_reference(x, amax(x), E4M3), cast_reference(weight, amax(weight), E4M3)
    want = (a.double() * a_scale) @ (b.double() * b_scale).t()
    torch.testing.assert_close(
        scaled_mm_reference(a, b.t(), a_scale, b_scale, torch.float32).double(), want, rtol=1e-5, atol=1e-4
    )
    out = GEMMS["tensorwise"]()(x, weight, None)
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize(("rows", "outer", "inner"), [(17, 32, 32), (16, 24, 32), (16, 32, 40)])
@pytest.mark.parametrize("scaling", GEMMS)
def test_sides_that_are_no_multiples_of_16_stay_in_16_bits(scaling: str, rows: int, outer: int, inner: int) -> None:
    x, weight, bias = torch.randn(rows, inner).to(torch.bfloat16), torch.randn(outer, inner), torch.randn(outer)
    wide = Linear.gemm(x, weight, bias)
    assert torch.equal(GEMMS[scaling]()(x, weight, bias), wide)


@pytest.mark.drawn(group="kernels")
def test_the_kernels_do_what_plain_operations_do(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("fp8_kernels.py"))


def make_run(**train: Any) -> Run:
    base = dict(seq_len=32, global_batch=4, dtype="bfloat16", device="cpu")
    return run_from_dict(
        dict(model=dict(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=64), train=base | train)
    )


def make_model(scaling: str) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(make_run().model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.05)
    use_fp8(model.layers, scaling)
    return model


class Calls(TorchDispatchMode):
    """Counts the operations of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "shardwise":
            self.calls[function._schema.name.split("::")[1]] += 1
        return function(*args, **(kwargs or {}))


# In each of two layers: what enters q, k and v, what enters out, what enters gate and up, what enters down; seven matrices; and
# the gradients of seven results.
WANTED = {
    "tensorwise": ({"amax": 36, "cast": 36, "scaled_mm_reference": 42}, {"cast": 22}, {"cast": 14}),
    "rowwise": ({"cast_rows": 36, "transpose": 14, "scaled_mm_reference": 28}, {}, {}),
}


def loss_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], finish=lambda x, matrix: model.loss(x, matrix, tokens[:, 1:])).result


@pytest.mark.parametrize("scaling", GEMMS)
def test_one_input_of_several_matrices_is_quantised_once(scaling: str) -> None:
    model, tokens = make_model(scaling), torch.randint(0, 64, (4, 33))
    with Calls() as counted:
        loss_of(model, tokens).backward()
    assert counted.calls == WANTED[scaling][0]
    assert isinstance(model.layers["0"].attention.q.gemm, Fp8Gemm)
    assert type(model.head.gemm) is type(Linear.gemm)


def counting_backend(graphs: list[Counter[str]]) -> Any:
    """A compiler that writes down the operations of this project in each graph, forward and backward."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(Counter(name.split(".")[1] for name in names if name.startswith("shardwise")))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)


@pytest.mark.parametrize("scaling", GEMMS)
@pytest.mark.drawn(group="compiled")
def test_compiled_a_gathered_matrix_is_transposed_in_the_backward_pass(scaling: str) -> None:
    """A transposed copy that is made in the forward pass is saved until the backward pass, for every microbatch anew."""
    weight, graphs = numbers(32, 16), list[Counter[str]]()
    eight, scale = cast_rows(weight, E4M3) if scaling == "rowwise" else cast_reference(weight, amax(weight), E4M3)
    matrix, x = Fp8Matrix(eight, scale, torch.float32).requires_grad_(), numbers(16, 16).requires_grad_()
    torch._dynamo.reset()
    torch.compile(GEMMS[scaling](), backend=counting_backend(graphs))(x, matrix, None).sum().backward()
    assert [graph["transpose"] for graph in graphs] == [0, 1]


@pytest.mark.parametrize("scaling", GEMMS)
@pytest.mark.drawn(group="fp8")
def test_compiled_it_is_one_graph_that_gives_the_same_and_quantises_once(scaling: str) -> None:
    graphs: list[Counter[str]] = []
    backend = counting_backend(graphs)
    model, tokens = make_model(scaling), torch.randint(0, 64, (4, 33))
    compiled = copy.deepcopy(model)
    torch._dynamo.reset()
    for block in compiled.layers.values():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    losses = []
    for each in (model, compiled):
        losses.append(loss_of(each, tokens))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for one, other in zip(model.parameters(), compiled.parameters(), strict=True):
        assert relative(other.grad, one.grad) < 1e-2
    forward, backward = graphs[0], graphs[1]
    assert forward["cast"] == WANTED[scaling][1].get("cast", 0) // 2
    assert backward["cast"] == WANTED[scaling][2].get("cast", 0) // 2


@pytest.mark.parametrize("scaling", GEMMS)
def test_less_is_kept_for_the_backward_pass(scaling: str) -> None:
    kept: dict[str, int] = {}
    for kind in ("none", scaling):
        model = make_model(scaling)
        if kind == "none":
            for module in model.modules():
                if isinstance(module, Linear):
                    module.gemm = Linear.gemm
        storages: dict[int, int] = {}

        def note(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = model.layers["0"](torch.randn(4, 32, 64, dtype=torch.bfloat16), None, None)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept[kind] = sum(size for at, size in storages.items() if at not in own)
        del out
    assert kept[scaling] < kept["none"]


def losses(**train: Any) -> list[float]:
    train_state = TrainState(make_run(steps=25, lr=1e-2, **train))
    rng = np.random.default_rng(0)
    chain = rng.permutation(64)  # each token foretells the next, nine times of ten
    found = []
    for _ in range(25):
        tokens = np.empty((4, 33), np.int64)
        tokens[:, 0] = rng.integers(0, 64, 4)
        for n in range(32):
            tokens[:, n + 1] = np.where(rng.random(4) < 0.9, chain[tokens[:, n]], rng.integers(0, 64, 4))
        found.append(train_state.train_step(Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())).loss.item())
    return found


@pytest.mark.large("that errors of many steps do not add up; single steps are compared in the small tier")
def test_a_model_learns_what_it_learns_in_16_bits() -> None:
    wide = losses()
    assert np.mean(wide[-5:]) < 0.75 * wide[0]
    for scaling in GEMMS:
        assert np.mean(losses(fp8=scaling)[-5:]) == pytest.approx(np.mean(wide[-5:]), rel=0.05)


def test_a_run_that_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"fp8 GEMMs need train\.dtype = bfloat16"):
        make_run(fp8="rowwise", dtype="float16")
    with pytest.raises(UserError, match="scale needs the tensor"):
        run_from_dict(dict(layout=dict(tensor=2, async_tensor=True), train=dict(fp8="rowwise", dtype="bfloat16")))
