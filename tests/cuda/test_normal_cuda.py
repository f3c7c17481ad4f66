"""Initial weights on a GPU have the bits of a CPU, and need no more of its memory than they take and one block."""

from __future__ import annotations

import cases
import pytest
import torch

from shardwise.model.normal import GPU_BLOCK, fill_normal
from shardwise.parallel.local_parameter import local
from shardwise.train.step import TrainState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("whole", [(3000, 5001), (7, 129, 1003), (1, 9_000_001)], ids=str)
def test_they_have_the_bits_of_a_cpu(whole: tuple[int, ...], dtype: torch.dtype) -> None:
    offset = tuple(length // 3 for length in whole)
    size = tuple(length - start for length, start in zip(whole, offset, strict=True))
    here, there = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype, device="cuda")
    offloaded = torch.empty(size, dtype=dtype)
    fill_normal(here, 0.02, 99, whole, offset)
    fill_normal(there, 0.02, 99, whole, offset)
    fill_normal(offloaded, 0.02, 99, whole, offset, torch.device("cuda"))
    assert torch.equal(here, there.cpu())
    assert torch.equal(here, offloaded)


@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_a_train_state_begins_as_on_a_cpu(model: str) -> None:
    one, other = (TrainState(cases.make_run(model, {}, device=device)) for device in ("cpu", "cuda"))
    for here, there in zip(one.parallel.parameters, other.parallel.parameters, strict=True):
        assert torch.equal(local(here.parameter), local(there.parameter).cpu()), here.name


def test_drawing_takes_one_block_of_memory() -> None:
    values = torch.empty(1 << 13, 1 << 14, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fill_normal(values, 0.02, 1, values.shape, (0, 0))
    assert torch.cuda.max_memory_allocated() - before < 40 * GPU_BLOCK
