"""The host's time of a training step by its operators: layers so narrow that the device never works, eager and as CUDA graphs.

Each case is a stack of decoder layers of width 64. What a step of it takes is the host's: launches, autograd, the recomputation's
saving of random state, the optimizer's lists. The slope over the layers is the cost of a layer, the rest of a step. The kernels of
a layer are counted by the profiler, so that seconds become seconds a kernel (`launch` in `shardwise/plan/cost/constants.py`).

    python benchmarks/gpu/host_time.py [--output host_time.json]      # about a minute on one GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from shapes import need_gpu
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, TOKENS = 64, 2, 16
LAYERS = (8, 24)


class Layer(nn.Module):
    """A decoder layer as programs write it: norms, one product for queries, keys and values, fused attention, a feed-forward
    layer."""

    def __init__(self, *, gated: bool, experts: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, (2 if gated else 1) * 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, experts, bias=False) if experts else None
        self.gated, self.experts = gated, experts

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Dense."""
        if self.gated:
            gate, up = self.up(x).chunk(2, -1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x)))

    def dropless(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens sorted by expert, whose counts the host waits for, as dispatchers without capacity do."""
        assert self.router is not None
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self.experts).tolist()
        rows = flat[order // 2]
        mixed = torch.cat([self.feed_forward(part) for part in rows.split(counts) if len(part)])
        result = torch.zeros_like(flat).index_add(0, order // 2, mixed * weights.flatten()[order, None].to(mixed.dtype))
        return result.view_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        h = self.norms[1](x)
        return x + (self.dropless(h) if self.experts else self.feed_forward(h))


def stack(layers: int, **shape: int) -> nn.Sequential:
    """So many layers on the device."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(Layer(gated=bool(shape.get("gated", 1)), experts=shape.get("experts", 0)) for _ in range(layers))
    ).cuda()


def seconds(work: Callable[[], object], times: int = 15) -> float:
    """The median of the wall clock from launch to end."""
    for _ in range(4):
        work()
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def kernels(work: Callable[[], object]) -> int:
    """Kernels that the work launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages())


def passes(model: nn.Sequential, x: torch.Tensor, *, way: str) -> Callable[[], object]:
    """One forward, or forward and backward."""

    def run(inputs: torch.Tensor) -> torch.Tensor:
        if way.endswith("recompute"):
            for layer in model:
                inputs = checkpoint(layer, inputs, use_reentrant=way == "reentrant recompute")
            return inputs
        return model(inputs)

    def forward() -> object:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
            return run(x)

    def both() -> object:
        with torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
            run(x.detach().requires_grad_()).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
        return None

    return forward if way == "forward" else both


def case(name: str, way: str, **shape: int) -> dict[str, object]:
    """The cost of a layer, by the slope, and of a kernel."""
    taken, launched = [], []
    for layers in LAYERS:
        model = stack(layers, **shape)
        if way != "autocast":
            model = model.bfloat16()
        x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.float32 if way == "autocast" else torch.bfloat16)
        work = passes(model, x, way=way)
        taken.append(seconds(work))
        launched.append(kernels(work))
    span = LAYERS[1] - LAYERS[0]
    each, count = (taken[1] - taken[0]) / span, (launched[1] - launched[0]) / span
    row: dict[str, object] = dict(case=name, way=way, layer_us=1e6 * each, kernels=count, kernel_us=1e6 * each / count)
    row["rest_us"] = 1e6 * (taken[0] - LAYERS[0] * each)
    return row


def graphed() -> dict[str, object]:
    """Forward and backward replayed: what the device itself takes between two kernels."""
    taken, launched = [], []
    for layers in LAYERS:
        model = stack(layers).bfloat16()
        x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x).sum().backward()
        torch.cuda.synchronize()
        for parameter in model.parameters():
            parameter.grad = None

        def both(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model(x).sum().backward()

        launched.append(kernels(both))
        for parameter in model.parameters():
            parameter.grad = None
        x.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x).sum().backward()
        taken.append(seconds(graph.replay))
    span = LAYERS[1] - LAYERS[0]
    each, count = (taken[1] - taken[0]) / span, (launched[1] - launched[0]) / span
    return dict(case="dense", way="graph", layer_us=1e6 * each, kernels=count, kernel_us=1e6 * each / count)


def optimizers() -> list[dict[str, object]]:
    """A step of AdamW, of many small tensors, in the ways PyTorch has, with and without clipping."""
    rows: list[dict[str, object]] = []
    for way in ("foreach", "fused"):
        taken = []
        for layers in LAYERS:
            model = stack(layers)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=way == "fused")

            def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

            taken.append(seconds(step))
        each = (taken[1] - taken[0]) / (LAYERS[1] - LAYERS[0])
        rows.append(
            dict(case="AdamW and clipping", way=way, layer_us=1e6 * each, rest_us=1e6 * (taken[0] - LAYERS[0] * each))
        )
    return rows


def main() -> int:
    """Measure, print a table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    need_gpu()
    rows: list[dict[str, object]] = []
    for way in ("forward", "both", "autocast", "recompute", "reentrant recompute"):
        rows.append(case("dense", way))
    rows.append(case("dense, not gated", "both", gated=0))
    rows.append(case("8 experts, dropless", "both", experts=8))
    rows.append(graphed())
    rows += optimizers()
    for row in rows:
        print("  ".join(f"{key} {value:.1f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    if args.output:
        content = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rows=rows)
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
