"""Products by chosen algorithms, as far as that goes without a GPU: what is asked of the library, how they are told apart and
kept."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from shardwise.model.gemm import tuned
from shardwise.model.gemm.cublaslt import Algorithm, LibraryError, Shape, is_aligned
from shardwise.model.gemm.decoding import DecodingGemms, is_right
from shardwise.model.gemm.experiment import Experiment
from shardwise.model.kernels.attention import tiles
from shardwise.model.layers import Gemm, Linear
from shardwise.model.quantized.formats import E4M3, E5M2
from shardwise.model.quantized.fp8 import scaled_mm
from shardwise.run import run_from_dict
from shardwise.run.derive import tunes_gemms

BF16 = torch.bfloat16


def shape(rows: int = 64, columns: int = 32, depth: int = 16) -> Shape:
    found = Shape.of(torch.zeros(rows, depth, dtype=BF16), torch.zeros(depth, columns, dtype=BF16), BF16)
    assert found is not None
    return found


def test_a_shape_says_how_operands_lie() -> None:
    by_rows, by_columns = torch.zeros(64, 16, dtype=BF16), torch.zeros(32, 16, dtype=BF16).mT
    found = Shape.of(by_rows, by_columns, torch.float32)
    assert found == Shape(64, 32, 16, False, True, 16, 16, BF16, BF16, torch.float32)
    assert found.name == "64x32x16 rc 16 16 bfloat16 float32"
    part = torch.zeros(64, 48, dtype=BF16)[:, 16:32]
    assert Shape.of(part, by_columns, BF16) == Shape(64, 32, 16, False, True, 48, 16, BF16, BF16, BF16)


def test_in_8_bits_operands_lie_by_what_is_summed_over() -> None:
    left, right = torch.zeros(64, 16, dtype=E5M2), torch.zeros(32, 16, dtype=E4M3)
    found = Shape.of(left, right.t(), BF16, adds=True, fast=True)
    assert found is not None
    assert found.name == "64x32x16 rc 16 16 float8_e5m2 float8_e4m3fn bfloat16 adds fast"
    assert Shape.of(left, right.t().contiguous(), BF16) is None
    assert Shape.of(left.t().contiguous().t(), right.t(), BF16) is None
    assert Shape.of(left, right.t().to(BF16), BF16) is None
    assert Shape.of(left.to(BF16), right.t(), BF16) is None


@pytest.mark.parametrize(
    "left",
    [
        torch.zeros(64, 48, dtype=BF16)[:, 1:17],  # begins between places that kernels load from
        torch.zeros(64, 12, dtype=BF16)[:, :8],  # its second row does
        torch.zeros(64, 32, dtype=BF16)[:, ::2],  # neither rows nor columns without gaps
        torch.zeros(1, 16, dtype=BF16).expand(64, 16),  # one row for all
        torch.zeros(64, 16, dtype=torch.float64),
        torch.zeros(64, 16, dtype=torch.float16),  # not of the other's kind
    ],
)
def test_what_the_library_does_not_take_is_left_alone(left: torch.Tensor) -> None:
    assert Shape.of(left, torch.zeros(left.shape[1], 32, dtype=BF16), BF16) is None


def test_where_a_product_may_be_written() -> None:
    assert is_aligned(torch.zeros(3, 8, dtype=BF16))
    assert not is_aligned(torch.zeros(3, 9, dtype=BF16))  # such is a vocabulary of 50257
    assert not is_aligned(torch.zeros(8, 8, dtype=BF16).mT)
    assert not is_aligned(torch.zeros(33, dtype=BF16)[1:].view(4, 8))


def test_choices_are_kept_beside_those_of_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "choices.json"
    mine, theirs = tuned.Choices(0, path), tuned.Choices(0, path)
    mine.keep({shape(8): Algorithm(b"\1" * 64, 4)})
    theirs.keep({shape(16): None})
    assert tuned.Choices(0, path).known == {shape(8).name: Algorithm(b"\1" * 64, 4), shape(16).name: None}


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"a": 3}', '{"a": ["zz", 1]}', '{"a": ["00"]}', "\0"])
def test_a_spoiled_file_is_no_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "choices.json"
    path.write_text(content)
    choices = tuned.Choices(0, path)
    assert choices.known == {}
    choices.keep({shape(): None})
    assert json.loads(path.read_text()) == {shape().name: None}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    choices = tuned.Choices(0, tmp_path / "file" / "choices.json")
    choices.keep({shape(): None})
    assert choices.known == {shape().name: None}


def test_what_is_kept_is_used_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "Multiplication", FakeMultiplication)
    choices = tuned.Choices(0, tmp_path / "choices.json")
    assert choices.of(shape()) is None
    choices.keep({shape(): Algorithm(b"\1" * 64, 0)})
    found = choices.of(shape())
    assert found is not None
    assert found[1] == Algorithm(b"\1" * 64, 0)


class FakeMultiplication:
    """Takes only what begins with a one."""

    def __init__(self, shape: Shape, device: int) -> None:
        if shape.rows == 666:
            raise LibraryError("no")

    def takes(self, algorithm: Algorithm) -> bool:
        return algorithm.code.startswith(b"\1")


def test_shapes_that_are_not_known_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "Multiplication", FakeMultiplication)
    good, bad = Algorithm(b"\1" * 64, 0), Algorithm(b"\2" * 64, 0)
    choices = tuned.Choices(0, tmp_path / "choices.json")
    choices.keep({shape(16): good, shape(24): bad, shape(32): None})
    assert [choices.of(shape(rows)) for rows in (48, 24, 32, 40, 48)] == [
        None
    ] * 5  # the library does not know the second's
    assert list(choices.unknown) == [shape(48), shape(40)]
    found = choices.of(shape(16))
    assert found is not None
    assert found[1] == good
    choices.use(shape(48), good)
    choices.use(shape(16), None)
    again = choices.of(shape(48))
    assert again is not None
    assert again[1] == good
    assert choices.of(shape(16)) is None


def test_a_library_that_fails_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "Multiplication", FakeMultiplication)
    choices = tuned.Choices(0, tmp_path / "choices.json")
    choices.known = {shape(666).name: Algorithm(b"\1" * 64, 0)}
    with pytest.raises(LibraryError):
        choices.of(shape(666))
    assert choices.of(shape(666)) is None


def test_options_come_equally_often_and_in_all_company() -> None:
    experiment = Experiment([4, 3, 1])
    drawn = [experiment.draw() for _ in range(120)]
    for choice, count in enumerate((4, 3, 1)):
        assert sorted({one[choice] for one in drawn}) == list(range(count))
        assert {sum(one[choice] == option for one in drawn) for option in range(count)} == {120 // count}
    assert len({one[:2] for one in drawn}) == 12


EFFECTS = ((0, -3, -2), (0, 1, 2, 3), (0, -1, 2), (0,), (0, 0, 0))


@pytest.mark.parametrize("seed", range(5))
def test_the_best_are_told_apart_in_noise_and_drift(seed: int) -> None:
    noise, experiment, times = random.Random(seed), Experiment([len(one) for one in EFFECTS], seed), []
    for step in range(256):
        drawn = experiment.draw()
        strange = 400 if noise.random() < 0.03 else 0  # an evaluation in between
        steady = 490 + 0.01 * step + sum(one[option] for one, option in zip(EFFECTS, drawn, strict=True))
        times.append(steady + noise.gauss(0, 2) + strange)
    outcome = experiment.outcome(times)
    assert outcome.options[:2] == (1, 0)
    assert outcome.options[3] == 0
    assert 2 < outcome.saves < 6


def test_options_that_do_nothing_are_seldom_taken() -> None:
    noise, taken = random.Random(0), 0
    for seed in range(20):
        experiment = Experiment([4] * 10, seed)
        for _ in range(256):
            experiment.draw()
        taken += sum(option > 0 for option in experiment.outcome([noise.gauss(490, 3) for _ in range(256)]).options)
    assert taken < 60  # of 200; who takes them must compare, and finds that nothing is gained


def test_nothing_to_choose_is_nothing_chosen() -> None:
    experiment = Experiment([1, 1])
    for _ in range(40):
        experiment.draw()
    assert experiment.outcome([1.0] * 40).options == (0, 0)
    assert Experiment([]).outcome([]).options == ()


def test_without_noise_it_is_exact() -> None:
    experiment = Experiment([len(one) for one in EFFECTS])
    drawn = [experiment.draw() for _ in range(64)]
    times = [100 + sum(one[option] for one, option in zip(EFFECTS, each, strict=True)) for each in drawn]
    outcome = experiment.outcome(times)
    assert outcome.options[:4] == (1, 0, 1, 0)
    assert outcome.saves == pytest.approx(4)


def test_too_few_steps_decide_nothing() -> None:
    experiment = Experiment([4, 4])
    for _ in range(6):
        experiment.draw()
    assert experiment.outcome([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).options == (0, 0)


def learned(gemm: Gemm, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """What a layer makes of something, and the gradients."""
    torch.manual_seed(0)
    layer, x = Linear(24, 16, bias=False), torch.randn(2, 3, 24, dtype=dtype, requires_grad=True)
    layer.gemm = gemm
    out = layer(x)
    out.square().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_contiguous()
    return out, x.grad, layer.weight.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
@pytest.mark.parametrize("large", [False, True])
def test_on_a_cpu_it_is_the_plain_product(dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "worth_tuning", lambda left, right: large)
    results = learned(Gemm(), dtype), learned(tuned.TunedGemm(), dtype)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.drawn(group="compiled")
def test_operators_are_what_pytorch_expects() -> None:
    left, transposed = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    torch.library.opcheck(tuned.gemm, (left, transposed.mT))
    operands = torch.randn(4, 8), torch.randn(8, 6), torch.zeros(4, 6)
    torch.library.opcheck(tuned.gemm_into._opoverload, (*operands, False))
    torch.library.opcheck(tuned.gemm_onto, (*operands[:2], torch.randn(6, 4).mT))


def test_products_in_8_bits_are_what_pytorch_expects() -> None:
    left, right = torch.randn(32, 16).to(E5M2), torch.randn(48, 16).to(E4M3)
    scales = torch.tensor(0.5), torch.tensor(4.0)
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # the schema's would multiply the operands by a number
    torch.library.opcheck(tuned.fp8_gemm, (left, right.t(), *scales, BF16, True), test_utils=checks)
    args = (left, right.t(), *scales, BF16, False, torch.randn(48, 32, dtype=BF16).mT)
    torch.library.opcheck(tuned.fp8_gemm_onto, args, test_utils=checks)


def test_products_in_8_bits_are_the_plain_ones_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "worth_tuning", lambda left, right: True)
    left, right = torch.randn(32, 16).to(E4M3), torch.randn(48, 16).to(E4M3)
    for scales in ((torch.tensor(0.5), torch.tensor(4.0)), (torch.rand(32, 1), torch.rand(1, 48))):
        wanted = scaled_mm(left, right, scales, BF16)
        assert torch.equal(tuned.tuned_scaled_mm(left, right, scales, BF16), wanted)
    base = torch.randn(32, 48, dtype=BF16)
    summed = tuned.fp8_gemm_onto(left, right.t(), torch.tensor(0.5), torch.tensor(4.0), BF16, False, base)
    assert torch.equal(summed, (base.float() + 2 * (left.float() @ right.t().float())).to(BF16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_when_products_are_tuned(dtype: str) -> None:
    run = run_from_dict(dict(train=dict(dtype=dtype)))
    assert tunes_gemms(run, gpu=True)
    assert not tunes_gemms(run, gpu=False)
    assert not tunes_gemms(run_from_dict(dict(train=dict(dtype=dtype, tune_products=False))), gpu=True)
    assert tunes_gemms(run_from_dict(dict(train=dict(dtype=dtype), layout=dict(shard=2))), gpu=True)


@pytest.mark.parametrize("add", [False, True])
def test_the_operator_puts_and_adds(add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "worth_tuning", lambda left, right: True)
    left, right = torch.randn(4, 8), torch.randn(8, 6)
    mine, plain = torch.ones(4, 6), torch.ones(4, 6)
    tuned.TunedGemm().put(left, right, mine, add)
    Gemm().put(left, right, plain, add)
    assert torch.equal(mine, plain)
    torch.testing.assert_close(mine, left @ right + add)


class Ran:
    """Stands for a GEMM of the library: notes what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, bool]] = []

    def run(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, algorithm: object, base: object) -> None:
        self.given.append((len(left), base is out))
        torch.add(left @ right, out if base is out else 0, out=out)


def test_steps_of_known_sizes_take_their_algorithm_and_others_are_left_to_pytorch() -> None:
    gemms, ran = DecodingGemms(), Ran()
    x, matrix, stream = torch.randn(4, 6), torch.randn(8, 6), torch.randn(4, 8)
    gemms.chosen[4, 8, 6, True] = gemms.chosen[4, 8, 6, False] = (ran, Algorithm(b"", 0))  # type: ignore[assignment]
    assert gemms(x[:3], matrix) is None
    assert gemms(torch.randn(6, 4).t(), matrix) is None
    made = gemms(x, matrix)
    assert made is not None
    torch.testing.assert_close(made, x @ matrix.t())
    wanted = stream + x @ matrix.t()
    assert gemms(x, matrix, stream) is stream
    torch.testing.assert_close(stream, wanted)
    assert gemms(x, matrix, stream, adds=False) is stream  # a rank that adds nothing but its part
    torch.testing.assert_close(stream, x @ matrix.t())
    assert ran.given == [(4, False), (4, True), (4, False)]


def test_shapes_of_attention_are_kept_for_the_next_process_and_wrong_ones_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, path = torch.device("cuda", 0), tmp_path / "made" / "tiles.json"
    monkeypatch.setattr(tiles, "_path", lambda device: path)
    tiles._kept.cache_clear()
    assert tiles.decode_tile(300, 128, device) == tiles.DECODE["many"]
    assert tiles.decode_tile(100, 128, device) == tiles.DECODE["some"]
    tiles.save_tiles({tiles.decode_name(256, 128): tiles.DecodeTile(64, 2, 3)}, device)
    tiles.save_tiles({tiles.prompt_name(128): tiles.PromptTile(128, 64, 8, 3)}, device)
    tiles._kept.cache_clear()
    assert tiles.decode_tile(300, 128, device) == tiles.DecodeTile(64, 2, 3)
    assert tiles.decode_tile(300, 64, device) == tiles.DECODE["many"]
    assert tiles.prompt_tile(500, 128, device) == tiles.PromptTile(128, 64, 8, 3)
    assert tiles.prompt_tile(9, 128, device).rows == 16
    for wrong in ('{"decode many 128": [64, "4"]}', '{"decode many 128": [64, 4, 0]}', "[1]", "{"):
        path.write_text(wrong)
        tiles._kept.cache_clear()
        assert tiles.decode_tile(300, 128, device) == tiles.DECODE["many"]
    tiles._kept.cache_clear()


class Counterfeit:
    """A multiplication whose algorithm loses something."""

    def __init__(self, lost: str) -> None:
        self.lost = lost

    def run(
        self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, algorithm: object, base: torch.Tensor | None
    ) -> None:
        found = x.float() @ y.float()
        if self.lost == "a part of the sum":
            found = x.float()[:, :-16] @ y.float()[:-16]
        if base is not None and self.lost != "what it adds to":
            found += base.float()
        out.copy_(found)
        if self.lost == "its last row":
            out[-1] = torch.nan


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("lost", ["", "a part of the sum", "what it adds to", "its last row"])
def test_algorithms_whose_results_are_wrong_are_not_taken(lost: str, adds: bool) -> None:
    numbers = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(size, generator=numbers).to(BF16) for size in ((4, 64), (32, 64)))
    algorithm = Algorithm(b"", 64)
    right = lost == "" or (lost == "what it adds to" and not adds)
    assert is_right(Counterfeit(lost), algorithm, x, matrix, adds) == right  # type: ignore[arg-type]
