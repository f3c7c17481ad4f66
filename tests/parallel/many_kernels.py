"""Passes over many tensors: `test_in_place.py` runs them with Triton's interpreter for a GPU, `tests/cuda` on one."""

from __future__ import annotations

import torch

from shardwise.model.kernels.many import AT_ONCE, MOST, TURNS, cast, repeat, sum_of_squares


def check(device: str) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16().to(device)

    whole = AT_ONCE * TURNS
    for sizes in (
        (1,),
        (5000, AT_ONCE, AT_ONCE - 1, 0, 1),
        (whole, whole + 1),
        tuple(range(300, 300 + 7 * (MOST + 3), 7)),
    ):
        narrow = [random(size) for size in sizes]
        wide = [torch.full((size + 1,), 7.0, device=device) for size in sizes]
        cast(narrow, [each[:-1] for each in wide])
        for one, other in zip(narrow, wide, strict=True):
            assert torch.equal(other[:-1], one.float())
            assert other[-1] == 7
        twice = [each[:-1].clone() for each in wide]
        cast(narrow, twice, adds=True)
        assert all(torch.equal(one, 2 * other.float()) for one, other in zip(twice, narrow, strict=True))
        back = [torch.empty_like(one) for one in narrow]
        cast([each[:-1] for each in wide], back)
        assert all(torch.equal(one, other) for one, other in zip(narrow, back, strict=True))
        for tensors in (narrow, [each[:-1] for each in wide]):
            want = sum(float(each.double().square().sum()) for each in tensors)
            assert abs(float(sum_of_squares(tensors)) - want) <= 1e-6 * want
    assert float(sum_of_squares([])) == 0
    for times in (4, TURNS + 3):
        parts = [random(size) for size in (1, 5, 0, 3000)]
        wholes = [torch.empty(times * part.numel(), dtype=torch.bfloat16, device=device) for part in parts]
        wholes[3][3000:6000] = parts[3]
        repeat([*parts[:3], wholes[3][3000:6000]], wholes, times)
        assert all(torch.equal(whole, part.repeat(times)) for part, whole in zip(parts, wholes, strict=True))


if __name__ == "__main__":
    check("cpu")
