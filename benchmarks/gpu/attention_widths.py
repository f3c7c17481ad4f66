"""cuDNN's causal attention by the widths of keys and values, as latent attention and ALiBi have them.

    python benchmarks/gpu/attention_widths.py [--out FILE]

Device time of single calls, mean of 8, in the form of `attention` in `h200_kernels.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTHS = ((128, 128), (136, 128), (144, 128), (160, 128), (192, 128), (192, 192))
SHAPES = ((2, 32, 2048), (1, 32, 4096), (1, 16, 8192), (4, 16, 4096))
"""Batch, heads and tokens."""


def mean_seconds(act: Any, times: int = 8) -> float:
    act()
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in "fl")
    first.record()
    for _ in range(times):
        act()
    last.record()
    last.synchronize()
    return 1e-3 * first.elapsed_time(last) / times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for batch, heads, length in SHAPES:
        for width, values in WIDTHS:

            def random(columns: int, batch: int = batch, heads: int = heads, length: int = length) -> torch.Tensor:
                x = torch.randn(batch, length, heads, columns, device="cuda", dtype=torch.bfloat16)
                return x.transpose(1, 2).requires_grad_()

            q, k, v = random(width), random(width), random(values)
            grad = torch.randn_like(v)

            def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            out = forward()

            def backward(out: Any = out, of: Any = (q, k, v), grad: Any = grad) -> object:
                return torch.autograd.grad(out, of, grad, retain_graph=True)

            rows.append(
                dict(kernel="flash3", batch=batch, heads=heads, kv_heads=heads, queries=length, keys=length,
                     head_dim=width, v_dim=values, causal=True, forward=mean_seconds(forward), backward=mean_seconds(backward))
            )  # fmt: skip
            print(
                batch,
                heads,
                length,
                width,
                values,
                *(round(1e6 * rows[-1][d], 1) for d in ("forward", "backward")),
                flush=True,
            )
    if args.out:
        args.out.write_text("\n".join(json.dumps(row) for row in rows))


if __name__ == "__main__":
    main()
