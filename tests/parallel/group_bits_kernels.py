"""What `test_quantized_activations.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: the kernels
that pack saved tensors, bit for bit against plain PyTorch."""

from __future__ import annotations

import torch

from shardwise.model.kernels.group_bits import pack_groups, unpack_groups
from shardwise.parallel.activations.quantized import dequantize, quantize
from shardwise.run.saved_tensors import GROUP

generator = torch.Generator().manual_seed(3)
for bits in (8, 4, 2, 1):
    for size in (1, 63, 64, 2049, 5000):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-3, 2, (size,), generator=generator)
            x[: size // 3] = 0.5  # groups that are all the same have no step
            x = x.to(dtype)
            codes, ranges = quantize(x, bits)
            own = torch.full_like(codes, 0xAB), torch.full_like(ranges, 7.0)
            pack_groups(x, *own, bits, GROUP)
            assert torch.equal(own[0], codes), (bits, size, dtype, (own[0] != codes).sum())
            assert torch.equal(own[1], ranges), (bits, size, dtype)
            want = dequantize(codes, ranges, bits=bits, numel=size, dtype=dtype)
            made = (
                torch.float32 if dtype == torch.bfloat16 else dtype
            )  # to which the interpreter does not round as a GPU does
            back = unpack_groups(codes, ranges, bits, GROUP, size, made)
            assert torch.equal(back.to(dtype), want), (bits, size, dtype)
x = torch.zeros(600)
x[300] = torch.nan
groups = -(-600 // GROUP)
codes, ranges = torch.empty(groups * GROUP, dtype=torch.uint8), torch.empty(groups, 2, dtype=torch.bfloat16)
pack_groups(x, codes, ranges, 8, GROUP)
back = unpack_groups(codes, ranges, 8, GROUP, 600, torch.float32)
assert back.isnan().tolist() == [n // GROUP == 300 // GROUP for n in range(600)]
