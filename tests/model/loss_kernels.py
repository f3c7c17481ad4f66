"""What `test_loss.py` runs in a process of its own, in which Triton's interpreter stands for the GPU: a loss with its
gradient, against plain PyTorch."""

from __future__ import annotations

import torch

from shardwise.model.kernels.cross_entropy import cross_entropy_and_grad_fused, local_gradients_, local_sums
from shardwise.model.kernels.scale import scale_
from shardwise.model.loss import IGNORE_INDEX, cross_entropy_and_grad_reference

torch.manual_seed(1)
for rows, vocab in ((3, 5), (4, 2048), (2, 5000)):
    scores = 3 * torch.randn(rows, vocab)
    targets = torch.randint(0, vocab, (rows,))
    targets[1] = IGNORE_INDEX
    plain, fused = scores.clone(), scores.clone()
    losses = (
        cross_entropy_and_grad_reference(plain, targets),
        cross_entropy_and_grad_fused(fused, targets, IGNORE_INDEX),
    )
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-7)
    assert losses[1][1] == 0
    assert not fused[1].any()
    strided = torch.full((rows, vocab + 11), 7.0)  # rows may begin at lines of memory
    strided[:, :vocab] = scores
    torch.testing.assert_close(cross_entropy_and_grad_fused(strided[:, :vocab], targets, IGNORE_INDEX), losses[1])
    torch.testing.assert_close(strided[:, :vocab], fused)
    assert (strided[:, vocab:] == 7).all()

    parts, starts = scores.clone().split(-(-vocab // 3), dim=1), range(0, vocab, -(-vocab // 3))  # of three ranks
    totals, picked = zip(
        *(local_sums(part, targets, start) for part, start in zip(parts, starts, strict=True)), strict=True
    )
    total = torch.stack(totals).logsumexp(dim=0)
    torch.testing.assert_close(torch.where(targets == IGNORE_INDEX, 0, total - sum(picked)), losses[0])
    for part, start in zip(parts, starts, strict=True):
        local_gradients_(part, targets, total, start, IGNORE_INDEX)
    torch.testing.assert_close(torch.cat(parts, dim=1), plain, rtol=1e-5, atol=1e-7)

for numel in (1, 2048, 50_000):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values, factor = torch.randn(numel).to(dtype), torch.tensor(1 / 97)
        want = (values.float() * factor).to(dtype)
        scale_(values, factor)
        torch.testing.assert_close(
            values, want, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0
        )  # it cuts bits off
        before = values.clone()
        scale_(values, torch.tensor(1.0))
        assert torch.equal(values, before)
