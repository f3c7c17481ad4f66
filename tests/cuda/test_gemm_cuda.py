"""Products by a chosen algorithm, against PyTorch's: the same bits, for every way operands lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from shardwise.measure.verify import random_batch
from shardwise.model.gemm import tuned
from shardwise.model.gemm.candidates import Candidates
from shardwise.model.gemm.cublaslt import Multiplication, Shape
from shardwise.model.gemm.decoding import DecodingGemms, Kind
from shardwise.model.gemm.tuned import fp8_gemm_onto, tuned_scaled_mm
from shardwise.model.layers import Gemm, Linear
from shardwise.model.quantized.formats import E4M3, E5M2
from shardwise.model.quantized.fp8 import scaled_mm
from shardwise.parallel import apply
from shardwise.run import run_from_dict
from shardwise.train import tune_gemms
from shardwise.train.step import TrainState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices of a test are kept in its own folder, and made for small products too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuned, "LEAST", 1)
    tuned.choices.cache_clear()
    yield
    tuned.choices.cache_clear()


def matrix(rows: int, columns: int, transposed: bool, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(columns, rows, device="cuda") if transposed else torch.randn(rows, columns, device="cuda")
    return (x.mT if transposed else x).to(dtype)


@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_algorithm_multiplies(left_transposed: bool, right_transposed: bool, dtype: torch.dtype) -> None:
    left, right = matrix(512, 256, left_transposed, dtype), matrix(256, 1024, right_transposed, dtype)
    shape = Shape.of(left, right, dtype)
    assert shape is not None
    assert (shape.left_transposed, shape.right_transposed) == (left_transposed, right_transposed)
    multiplication = Multiplication(shape, 0)
    proposed = multiplication.proposed()
    assert len(proposed) > 1
    wanted = left.double() @ right.double()
    for algorithm in proposed:
        out = torch.full((512, 1024), torch.nan, dtype=dtype, device="cuda")
        multiplication.run(left, right, out, algorithm)
        assert (out.double() - wanted).abs().max() < 0.01 * wanted.abs().max()
        assert multiplication.takes(algorithm)


def test_operands_may_be_parts_of_larger_ones() -> None:
    whole = matrix(512, 512, False)
    left, right = whole[:, :256], matrix(256, 512, False)
    shape = Shape.of(left, right, torch.bfloat16)
    assert shape is not None
    assert shape.left_step == 512
    out = torch.empty(512, 512, dtype=torch.bfloat16, device="cuda")
    for algorithm in Multiplication(shape, 0).proposed():
        Multiplication(shape, 0).run(left, right, out, algorithm)
        assert torch.allclose(out.float(), left.float() @ right.float(), atol=0.3, rtol=0.02)
    assert (
        Shape.of(whole[:, 1:257], right, torch.bfloat16) is None
    )  # begins between two places that kernels can load from
    assert Shape.of(whole[:, ::2], right, torch.bfloat16) is None


def decide() -> None:
    """Take the last candidate for each shape that is not known."""
    choices = tuned.choices(0)
    for shape in list(choices.unknown):
        found = Candidates(shape, 0).found()
        assert found
        choices.keep({shape: found[-1]})
    assert not choices.unknown


@pytest.mark.parametrize("transposed", [False, True])
def test_candidates_give_the_same_bits(transposed: bool) -> None:
    left, right = matrix(4096, 1024, False), matrix(1024, 4096, transposed)
    shape = Shape.of(left, right, torch.bfloat16)
    assert shape is not None
    candidates = Candidates(shape, 0)
    assert Shape.of(candidates.left, candidates.right, torch.bfloat16) == shape
    for algorithm in candidates.found():
        out = torch.full((4096, 4096), torch.nan, dtype=torch.bfloat16, device="cuda")
        candidates.multiplication.run(left, right, out, algorithm)
        assert torch.equal(out, left @ right)


def test_choices_are_kept_and_read_again(tmp_path: Path) -> None:
    left, right = matrix(2048, 1024, False), matrix(1024, 2048, False)
    gemm, wanted = tuned.TunedGemm(), left @ right
    assert torch.equal(gemm.multiply(left, right), wanted)
    assert len(tuned.choices(0).unknown) == 1
    decide()
    (path,) = (tmp_path / "shardwise" / "products").iterdir()
    (name,) = json.loads(path.read_text())
    assert torch.equal(gemm.multiply(left, right), wanted)
    best = Multiplication(next(iter(tuned.choices(0).made)), 0).proposed()[-1]
    path.write_text(json.dumps({name: [best.code.hex(), best.workspace]}))
    tuned.choices.cache_clear()
    assert torch.equal(gemm.multiply(left, right), wanted)
    (made,) = tuned.choices(0).made.values()
    assert made is not None
    assert made[1] == best
    for bad in (["00" * 64, 0], ["00", 0], ["no", 0], 3):  # what the library does not know is not used
        path.write_text(json.dumps({name: bad}))
        tuned.choices.cache_clear()
        assert torch.equal(gemm.multiply(left, right), wanted)
        assert not any(tuned.choices(0).made.values())


def test_into_a_wider_matrix_and_added() -> None:
    left, right = matrix(2048, 1024, True), matrix(1024, 512, False)
    mine, plain = (torch.full((2048, 512), torch.nan, device="cuda") for _ in range(2))
    tuned.TunedGemm().put(left, right, mine)
    decide()
    for add in (False, True, True):
        tuned.TunedGemm().put(left, right, mine, add)
        Gemm().put(left, right, plain, add)
        assert torch.equal(mine, plain)
    narrow, other = (torch.full((2048, 512), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tuned.TunedGemm().put(left, right, narrow)
    Gemm().put(left, right, other)
    assert torch.equal(narrow, other)


def test_chosen_products_can_be_recorded() -> None:
    left, right = matrix(1024, 1024, False), matrix(1024, 1024, False)
    wanted = left @ right
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tuned.TunedGemm().multiply(left, right)
    graph.replay()
    assert torch.equal(out, wanted)
    decide()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tuned.TunedGemm().multiply(left, right)
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("transposed", [False, True])
def test_onto_another_matrix(transposed: bool) -> None:
    left, right, base = matrix(2048, 1024, False), matrix(1024, 512, transposed), matrix(2048, 512, False)
    before = base.clone()
    wanted = base.double() + left.double() @ right.double()
    for _ in range(2):  # by the library's first proposal, then by the one chosen
        out = tuned.gemm_onto(left, right, base)
        assert (out.double() - wanted).abs().max() < 0.005 * wanted.abs().max()  # rounded once
        assert torch.equal(base, before)
        decide()
    (shape,) = tuned.choices(0).made
    assert shape.adds
    assert torch.allclose(tuned.gemm_onto(left[:, ::2], right[::2], base), torch.addmm(base, left[:, ::2], right[::2]))


eight = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_eight = pytest.mark.skipif(not eight, reason="needs a GPU with 8-bit products")
IN_EIGHT = [pytest.param(scaling, marks=needs_eight) for scaling in ("tensorwise", "rowwise")]


@needs_eight
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_8_bits(kind: torch.dtype, fast: bool, dtype: torch.dtype) -> None:
    left, right = matrix(2048, 1024, False).to(kind), matrix(512, 1024, False).to(E4M3)
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(8.0, device="cuda")
    wanted = scaled_mm(left, right, scales, dtype, fast=fast)
    exact = 4 * (left.float().double() @ right.float().double().t())
    base = matrix(2048, 512, False).to(dtype)
    for _ in range(2):  # by PyTorch, then by the one chosen
        assert torch.equal(tuned_scaled_mm(left, right, scales, dtype, fast=fast), wanted)
        summed = fp8_gemm_onto(left, right.t(), *scales, dtype, fast, base)
        assert (summed.double() - base.double() - exact).abs().max() < 0.01 * exact.abs().max()
        for shape in list(tuned.choices(0).unknown):
            found = Candidates(shape, 0).found()
            tuned.choices(0).keep({shape: found[-1] if found else None})
    assert {shape.adds for shape in tuned.choices(0).made} == {False, True}
    (algorithm,) = {one[1] for shape, one in tuned.choices(0).made.items() if shape.adds and one is not None}
    assert algorithm.code  # which PyTorch has none for
    other = torch.tensor(2.0, device="cuda"), scales[1]  # not the scales of the last time
    assert torch.equal(
        tuned_scaled_mm(left, right, other, dtype, fast=fast), scaled_mm(left, right, other, dtype, fast=fast)
    )


@pytest.mark.parametrize("fp8", ["none", IN_EIGHT[0]])
def test_compiled_layers_add_as_they_multiply(fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dict(layers=2, hidden=512, heads=4, kv_heads=2, ffn=1024, vocab=1000)
    train = dict(global_batch=4, seq_len=512, dtype="bfloat16", device="cuda", compile=True, lr=1e-3, fp8=fp8)
    run = run_from_dict(dict(model=model, train=train))
    real, results = apply.compiled, []
    for adds in (True, False):
        if not adds:
            monkeypatch.setattr(apply, "compiled", lambda call, **how: real(call, **how | dict(accumulates=False)))
        train_state = TrainState(run)
        results.append([train_state.train_step(random_batch(run, number)).read()[:2] for number in range(5)])
        assert any(shape.adds and shape.fp8 == (fp8 != "none") for shape in tuned.choices(0).made) == adds
        tuned.choices.cache_clear()
    for mine, plain in zip(*results, strict=True):
        assert mine == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize("fp8", ["none", *IN_EIGHT])
def test_a_second_start_finds_what_was_compiled(fp8: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    model = dict(layers=2, hidden=512, heads=4, kv_heads=2, ffn=1024, vocab=1000)
    train = dict(global_batch=4, seq_len=512, dtype="bfloat16", device="cuda", compile=True, fp8=fp8)
    run, found = run_from_dict(dict(model=model, train=train)), []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        TrainState(run).train_step(random_batch(run, 0)).read()
        found.append(dict(counters["aot_autograd"]))
    assert "autograd_cache_hit" not in found[0]
    assert found[1] == dict(total=found[0]["total"], autograd_cache_hit=found[0]["total"], ok=found[0]["total"])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wide", [512, 4096])
def test_a_layer_learns_the_same(compiled: bool, wide: int) -> None:
    results: list[tuple[Tensor, ...]] = []
    for gemm in (Gemm(), tuned.TunedGemm()):
        torch.manual_seed(0)
        layer = Linear(1024, wide, bias=False, device="cuda")
        layer.gemm = gemm
        x = torch.randn(2, 1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        forward = torch.compile(layer.forward) if compiled else layer.forward
        forward(x)
        forward(x).square().sum().backward()
        decide()
        x.grad = layer.weight.grad = None
        out = forward(x)
        out.square().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32
        assert x.grad is not None
        results.append((out, x.grad, layer.weight.grad))
    for mine, plain in zip(*results, strict=True):
        assert torch.equal(mine, plain)
    assert len(tuned.choices(0).made) == 3


def test_a_run_finds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_gemms, "STEPS", 64)
    monkeypatch.setattr(tune_gemms, "COMPARED", 8)
    model = dict(layers=2, hidden=512, heads=4, kv_heads=2, ffn=1024, vocab=1000)
    train = dict(global_batch=4, seq_len=512, dtype="bfloat16", device="cuda", deterministic=True, compile=False)
    results = []
    for tunes in (False, True):
        run = run_from_dict(dict(model=model, train=dict(train, tune_products=tunes)))
        train_state, said = TrainState(run), []
        tune_gemms.attach(train_state, said.append)
        results.append([train_state.train_step(random_batch(run, number)).read() for number in range(80)])
        assert len(said) == (2 if tunes else 0)
    torch.use_deterministic_algorithms(False)
    assert results[0] == results[1]
    assert len(tuned.choices(0).known) >= 10


def test_the_gemms_of_decoding_are_timed_over_the_layers_and_kept() -> None:
    matrices = [matrix(1024, 512, False) for _ in range(3)]
    kinds = [Kind(matrices), Kind(matrices, adds=True)]
    gemms = DecodingGemms()
    gemms.tune(kinds, [4, 64])
    for rows in (4, 64):
        x, stream = matrix(rows, 512, False), matrix(rows, 1024, False)
        wanted, added = x.float() @ matrices[1].float().t(), stream.float() + x.float() @ matrices[1].float().t()
        for found, right in ((gemms(x, matrices[1]), wanted), (gemms(x, matrices[1], stream), added)):
            if found is not None:
                torch.testing.assert_close(found.float(), right, rtol=2e-2, atol=0.5)
    again = DecodingGemms()
    again.tune(kinds, [4, 64])  # from the file
    assert again.chosen.keys() == gemms.chosen.keys()
