"""What `test_in_place.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: the kernel that adds what
ranks sent, bit for bit against sums in the order of the ranks."""

from __future__ import annotations

import torch

from shardwise.model.kernels.sum_parts import sum_parts

generator = torch.Generator().manual_seed(5)
for ranks in (2, 3, 8):
    for numel in (1, 2047, 2048, 5000):
        for dtype in (torch.bfloat16, torch.float16):
            parts = torch.randn(ranks, numel, generator=generator).to(dtype)
            want = torch.zeros(numel)
            for part in parts:
                want += part.float()
            assert torch.equal(sum_parts(parts), want), (ranks, numel, dtype)
