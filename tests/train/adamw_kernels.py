"""What `test_optimizer.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: AdamW, against
PyTorch.s own."""

from __future__ import annotations

import torch

from shardwise.model.kernels.adamw import adamw

torch.manual_seed(3)


def reference(values, gradient, moments, factor, step, lr, betas, eps, decay):  # type: ignore[no-untyped-def]
    parameter = torch.nn.Parameter(values)
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=betas, eps=eps, weight_decay=decay)
    optimizer.state[parameter] = dict(step=torch.tensor(step - 1.0), exp_avg=moments[0], exp_avg_sq=moments[1])
    parameter.grad = gradient.float() * factor
    optimizer.step()


for size, wide in ((1, True), (1000, True), (5000, True), (2048, False)):
    start = torch.randn(size), torch.rand(size), torch.rand(size)
    gradient = torch.randn(size) if wide else torch.randn(size).bfloat16()
    kernel, plain = [t.clone() for t in start], [t.clone() for t in start]
    for step in (1, 2, 50):
        settings = torch.tensor([0.3]), step, 0.01, (0.9, 0.95), 1e-8, 0.1
        adamw(kernel[0], gradient, tuple(kernel[1:]), *settings)
        reference(plain[0], gradient, tuple(plain[1:]), *settings)
    for mine, theirs, before in zip(kernel, plain, start, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)
        assert not torch.equal(mine, before)
# With a copy, which leaves the rest as it was to the bit.
start, gradient = [torch.randn(5000), torch.rand(5000), torch.rand(5000)], torch.randn(5000).bfloat16()
copy, kept, alone = torch.zeros_like(gradient), [t.clone() for t in start], [t.clone() for t in start]
settings = torch.tensor([0.3]), 3, 0.01, (0.9, 0.95), 1e-8, 0.1
adamw(kept[0], gradient, tuple(kept[1:]), *settings, copy=copy)
adamw(alone[0], gradient, tuple(alone[1:]), *settings)
assert all(torch.equal(a, b) for a, b in zip(kept, alone, strict=True))
torch.testing.assert_close(copy.float(), kept[0], rtol=1e-2, atol=0)  # the interpreter cuts where a GPU rounds
