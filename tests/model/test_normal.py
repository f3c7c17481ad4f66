"""Normal numbers by their place: the same bits however a tensor is cut, and the distribution they should have."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardwise.model import normal
from shardwise.model.normal import fill_normal
from shardwise.torch_private import fake_tensors

KEY = 0x1234_5678_9ABC_DEF0
GOLDEN = [["-2.3490665", "0.0309499055", "-2.22821832"], ["2.45080423", "-1.44930792", "0.0806885362"]]


def drawn(
    whole: Sequence[int], offset: Sequence[int] | None = None, size: Sequence[int] | None = None, key: int = KEY
) -> Tensor:
    values = torch.empty(*(size or whole))
    fill_normal(values, 1.0, key, whole, offset or [0] * len(whole))
    return values


@pytest.fixture(scope="module")
def many() -> Tensor:
    return drawn((1 << 11, 1 << 11))


@pytest.mark.parametrize(
    "whole", [(1,), (999,), (1, 1), (37, 1), (64, 96), (51, 67), (1, 3001), (5, 13, 27), (3, 2, 5, 11)], ids=str
)
def test_any_box_has_the_bits_of_the_whole(whole: tuple[int, ...]) -> None:
    tensor, generator = drawn(whole), random.Random(0)
    assert tensor.isfinite().all()
    for _ in range(40):
        bounds = [sorted(generator.choices(range(length + 1), k=2)) for length in whole]
        box = drawn(whole, [start for start, _ in bounds], [stop - start for start, stop in bounds])
        assert torch.equal(box, tensor[tuple(slice(*each) for each in bounds)])


@pytest.mark.parametrize("block", [2, 3, 16, 200])
def test_blocks_leave_no_trace(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    whole, box = (3, 13, 33), ((1, 3, 5), (2, 9, 27))
    before = drawn(whole), drawn(whole, *box)
    monkeypatch.setattr(normal, "CPU_BLOCK", block)
    assert torch.equal(drawn(whole), before[0])
    assert torch.equal(drawn(whole, *box), before[1])


def test_the_numbers_stay_the_same() -> None:
    """On other machines, and in later versions: a run that is repeated begins as it did."""
    values = drawn((1 << 33, 3), ((1 << 33) - 2, 0), (2, 3))
    assert [[f"{x:.9g}" for x in row] for row in values.tolist()] == GOLDEN


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_get_the_float32_numbers_rounded(dtype: torch.dtype) -> None:
    values = torch.empty(30, 50, dtype=dtype)
    fill_normal(values, 0.02, KEY, values.shape, (0, 0))
    narrow = torch.empty(30, 50)
    fill_normal(narrow, 0.02, KEY, values.shape, (0, 0))
    assert torch.equal(values, narrow.to(dtype))


def test_they_are_normal(many: Tensor) -> None:
    """Moments within five standard errors, the distribution by the test of Kolmogorov and Smirnov, and tails as long as they should
    be."""
    x, n = many.double().flatten(), many.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs((x**power).mean().item() - moment) < 5 * math.sqrt(variance / n), power
    below = 0.5 * torch.erfc(-x.sort().values / math.sqrt(2))
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max((below - steps[:-1]).max().item(), (steps[1:] - below).max().item())
    assert distance * math.sqrt(n) < 2.2  # once in ten thousand
    for tail in (2, 3, 4, 4.5):
        expected = n * math.erfc(tail / math.sqrt(2))
        assert abs((x.abs() > tail).sum().item() - expected) < 5 * math.sqrt(expected)
    assert 4.8 < x.abs().max().item() < 6.7


def test_neighbours_rows_and_keys_are_independent(many: Tensor) -> None:
    x = many.double()
    other = drawn(many.shape, key=KEY + 1).double()
    pairs = [(x[:, :-lag], x[:, lag:]) for lag in (1, 2, 3, 64, 1024)]
    pairs += [(x[:-lag], x[lag:]) for lag in (1, 2, 3, 64, 1024)]
    pairs += [(x[:, 0::2], x[:, 1::2]), (x, other), (x, x.flip(0)), (x, x.flip(1))]
    for one, two in pairs:
        for first, second in ((one, two), ((one**2 - 1) / 2**0.5, (two**2 - 1) / 2**0.5)):
            product = first * second
            assert abs(product.mean().item()) < 5 * product.std().item() / math.sqrt(product.numel() / 2)


def test_a_matrix_has_the_singular_values_of_a_random_one(many: Tensor) -> None:
    """Patterns across rows and columns would stand out (Marchenko & Pastur 1967)."""
    for matrix in (many[:512, :512], many[:1024, :256], many[::4, ::4]):
        largest = torch.linalg.svdvals(matrix.double())[0].item()
        assert largest == pytest.approx(sum(math.sqrt(side) for side in matrix.shape), rel=0.02)


def test_every_radius_and_angle_is_a_number() -> None:
    """Also at the ends, where a logarithm or a root could leave its domain."""
    for start in (0, 1 << 16, 1 << 24, (1 << 30) - (1 << 15), (1 << 31) - (1 << 16)):
        words = torch.arange(start, start + (1 << 16)).int()
        radius, sine = normal._radius(words, 1.0).double(), normal._sine(words).double()
        u = (words.double() + 0.5) / 2**31
        torch.testing.assert_close(radius, (-2 * u.log()).sqrt(), rtol=3e-6, atol=4e-4)
        torch.testing.assert_close(sine, (math.pi * (u - 0.5)).sin(), rtol=0, atol=1e-6)


def test_a_fake_tensor_is_drawn_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for the memory of all, and there is nothing to draw."""
    real, drawn_pairs = normal._pairs, list[Tensor]()
    monkeypatch.setattr(normal, "_pairs", lambda *given: drawn_pairs.append(real(*given)) or drawn_pairs[-1])
    with fake_tensors():
        values = torch.empty(1 << 20, 1 << 12)
        fill_normal(values, 1.0, KEY, values.shape, (0, 0))
    (block,) = drawn_pairs
    assert normal.CPU_BLOCK < block.numel() <= 2 * normal.CPU_BLOCK
