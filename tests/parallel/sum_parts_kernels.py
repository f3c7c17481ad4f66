"""What `test_in_place.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: the kernel that adds what
ranks sent, bit for bit against sums in the order of the ranks, also where all parts have more elements than 32 bits count."""

from __future__ import annotations

import torch

from shardwise.model.kernels.sum_parts import AT_ONCE, _add, sum_parts

generator = torch.Generator().manual_seed(5)
for ranks in (2, 3, 8):
    for numel in (1, 2047, 2048, 5000):
        for dtype in (torch.bfloat16, torch.float16):
            parts = torch.randn(ranks, numel, generator=generator).to(dtype)
            want = torch.zeros(numel)
            for part in parts:
                want += part.float()
            assert torch.equal(sum_parts(parts), want), (ranks, numel, dtype)

numel = 2**30
many = torch.empty(3, numel, dtype=torch.bfloat16)  # only what is touched takes memory
many[:, :AT_ONCE] = torch.tensor([[1.0], [2.0], [4.0]])
first = torch.empty(AT_ONCE)
_add[(1,)](many, first, numel, 3, AT_ONCE)
assert (first == 7).all()
