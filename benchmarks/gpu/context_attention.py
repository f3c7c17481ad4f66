"""Attention of one context rank with its real kernels and stand-ins for its collectives, beside the same kernel alone: the share of
its TFLOP/s that ring, Ulysses and gathered attention keep, with all they do beside it (merging blocks, reordering, copies of what
would have been sent). At least 0.85 is asked for.

    python benchmarks/gpu/context_attention.py [--length 131072] [--ranks 8] [--out FILE]

The kernel alone is causal attention of the whole sequence with that rank's share of the heads: as many operations as the rank has.
The three ways and the kernel take turns, and medians are compared, forward and backward together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from shardwise.measure.stand_in import stand_in_collectives
from shardwise.model.attention import MaskBuilder
from shardwise.parallel.context import METHODS, ContextMaskBuilder, UlyssesAttention
from shardwise.parallel.mesh import Mesh
from shardwise.run.sections.layout import LayoutConfig

REQUIRED = 0.85
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def seconds(work: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> float:
    """Of a forward and a backward pass."""
    cuda = inputs[0].is_cuda
    if not cuda:
        began = time.perf_counter()
        out = work()
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    out = work()
    torch.autograd.grad(out, inputs, out)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def cases(length: int, ranks: int, rank: int, device: str) -> dict[str, Callable[[], float]]:
    """What is timed, by name. Called while the stand-ins are there."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def made(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)

    mesh = Mesh(LayoutConfig(context=ranks), device)
    group = mesh.group("context")
    assert group is not None
    own = [made(length // ranks, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    found: dict[str, Callable[[], float]] = {}
    for name, method in METHODS.items():
        core = method(HEAD_DIM**-0.5, group)
        if isinstance(core, UlyssesAttention):
            core.masks = MaskBuilder(0)
        mask = ContextMaskBuilder(0, ranks, name == "ulysses")(length // ranks, None, own[0].device)
        found[name] = lambda core=core, mask=mask: seconds(lambda: core(*own, mask), own)  # type: ignore[misc]
    whole = [made(length, heads) for heads in (HEADS // ranks, KV_HEADS // ranks, KV_HEADS // ranks)]

    def alone() -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in whole)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    found["kernel"] = lambda: seconds(alone, whole)
    return found


def main() -> int:
    """A line for each way; exit code 1 where one keeps less than is asked for, on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with stand_in_collectives(args.rank, args.ranks):
        ways = cases(args.length, args.ranks, args.rank, device)
        for way in ways.values():
            way()
            way()
        taken = {name: [] for name in ways}  # type: dict[str, list[float]]
        for _ in range(args.rounds):
            for name, way in ways.items():
                taken[name].append(way())
    # Two products forward and five backward, of half of all pairs.
    flops = 7 * args.length**2 * (HEADS / args.ranks) * HEAD_DIM
    alone = statistics.median(taken["kernel"])
    rows = [
        dict(way=name, ms=1e3 * (took := statistics.median(each)), tflops=flops / took / 1e12, share=alone / took)
        for name, each in taken.items()
    ]
    for row in rows:
        print(
            f"{row['way']:8} {row['ms']:8.2f} ms {row['tflops']:7.1f} TFLOP/s {row['share']:6.3f} of the kernel alone"
        )
    if args.out:
        args.out.write_text(json.dumps(dict(length=args.length, ranks=args.ranks, device=device, rows=rows), indent=1))
    return int(device == "cuda" and min(float(row["share"]) for row in rows) < REQUIRED)


if __name__ == "__main__":
    raise SystemExit(main())
