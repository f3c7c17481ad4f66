"""A mixture of 8 experts, 2 to a token, beside a dense model of the same active parameters, on one GPU.

Both have the same layers and heads; an expert is half as wide as the dense feed-forward layer, so that two of them are one. A
step is the trainer's own (`TrainState.train_step`), compiled, on random tokens, routed as the router pleases. Prints JSON lines:
milliseconds a step (median by CUDA events), model TFLOP/s of active parameters (`plan/cost/flops.py`), peak memory, and the MoE's
TFLOP/s by the dense model's. `--plain` adds the MoE without its kernels: what they brought. `--parts` times the steps of one layer
alone instead, each beside the time of its bytes or FLOPs at the rates of this GPU in the same run.

    python benchmarks/gpu/experts.py [--microbatch 4 8] [--steps 10] [--plain]
    python benchmarks/gpu/experts.py --parts [--microbatch 4]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from shapes import need_gpu
from steps import measure
from torch import Tensor, nn

from shardwise.measure.bench.kernels import Stopwatch
from shardwise.model.layers import FeedForward
from shardwise.model.moe import layer as moe
from shardwise.model.moe.ops import (
    combine,
    combine_weighted,
    combine_weighted_backward,
    dispatch,
    sort_by_expert,
    topk_experts,
)
from shardwise.parallel import expert
from shardwise.run import ModelConfig, Run, run_from_dict

EXPERTS, TAKEN = 8, 2


def run_of(args: argparse.Namespace, mixture: bool, micro: int) -> Run:
    """The dense run, or the one with experts."""
    model = dict(
        layers=args.layers, hidden=args.hidden, heads=args.heads, kv_heads=args.kv_heads, ffn=args.ffn, vocab=args.vocab
    )
    if mixture:
        model |= dict(experts=EXPERTS, experts_per_token=TAKEN, expert_ffn=args.ffn // TAKEN)
    train = dict(
        seq_len=args.seq_len, global_batch=micro, microbatch=micro, dtype="bfloat16", device=args.device, compile=True
    )
    return run_from_dict(dict(model=model, train=train))


def _never(x: Tensor) -> bool:
    return False


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Mixtures one operation after the other, but for the grouped product."""
    with contextlib.ExitStack() as stack:
        for module, name in ((moe, "has_fused_kernels"), (moe, "multiplies"), (expert, "has_fused_kernels")):
            stack.enter_context(mock.patch.object(module, name, _never))
        yield


def compare(args: argparse.Namespace) -> int:
    """Dense and mixture by microbatch; 1 where one of them did not run."""
    failed = 0
    for micro in args.microbatch:
        rows = {}
        for name in ("dense", "experts", *(["experts-plain"] if args.plain else [])):
            try:
                with without_kernels() if name == "experts-plain" else contextlib.nullcontext():
                    rows[name] = measure(run_of(args, name != "dense", micro), args.steps, name)
                print(json.dumps(rows[name]), flush=True)
            except Exception:  # one run that does not go must not cost the others
                traceback.print_exc()
                failed = 1
            gc.collect()
            torch.cuda.empty_cache()
            torch._dynamo.reset()
        for name in rows.keys() - {"dense"}:
            if "dense" in rows:
                ratio = rows[name]["tflops"] / rows["dense"]["tflops"]
                print(json.dumps(dict(microbatch=micro, compared=name, tflops_by_dense=ratio)), flush=True)
    return failed


class Pieces:
    """The pieces of one mixture layer, each beside its floor."""

    def __init__(self, args: argparse.Namespace, micro: int) -> None:
        self.device = torch.device(args.device)
        self.config: ModelConfig = run_of(args, True, micro).model
        self.dense: ModelConfig = run_of(args, False, micro).model
        self.micro, self.length = micro, args.seq_len
        self.tokens, self.rows = micro * args.seq_len, micro * args.seq_len * TAKEN
        self.watch = Stopwatch(self.device, samples=10)
        many = torch.empty(min(2**30, 32 * self.tokens * args.hidden), dtype=torch.int8, device=self.device)
        other = torch.empty_like(many)
        self.bandwidth = 2 * many.numel() / self.watch.seconds(lambda: other.copy_(many))
        print(json.dumps(dict(part="copy", gb_per_s=self.bandwidth / 1e9)), flush=True)

    def random(self, *shape: int, wide: bool = False) -> Tensor:
        """Numbers to work on."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32 if wide else torch.bfloat16) * 0.1

    def moved(self, part: str, work: Callable[[], object], numbers: float) -> None:
        """A piece that moves so many 16-bit numbers at the least."""
        self.told(part, work, 2 * numbers / self.bandwidth, "bytes")

    def told(self, part: str, work: Callable[[], object], floor: float, bound: str, **more: Any) -> float:
        """Time a piece and print it; gives its seconds."""
        try:
            seconds = self.watch.seconds(work)
        except Exception:  # one piece that does not go must not cost the others
            traceback.print_exc()
            return float("nan")
        line = dict(part=part, microbatch=self.micro, ms=seconds * 1e3, floor_ms=floor * 1e3, bound=bound, **more)
        print(json.dumps(line), flush=True)
        return seconds

    def routing(self) -> None:
        """Router, the order of its choices, rows there and back."""
        hidden, k = self.config.hidden, TAKEN
        x = self.random(self.tokens, hidden)
        router = moe.Router(self.config).to(self.device)
        nn.init.normal_(router.weight, std=0.02)
        # Its input is read, and read again and its gradient written.
        floors = tuple(2 * times * x.numel() / self.bandwidth for times in (1, 3))
        self.layer("router", router, lambda out: out[0].sum() + out[2].sum(), floors, "bytes")
        with without_kernels():
            self.layer("router plain", router, lambda out: out[0].sum() + out[2].sum(), floors, "bytes")
        scores = torch.rand(self.tokens, EXPERTS, device=self.device)
        self.moved("choices", lambda: topk_experts(scores, k), 2 * scores.numel() + 4 * self.rows)
        self.moved("choices plain (topk)", lambda: scores.topk(k, sorted=False), 2 * scores.numel() + 4 * self.rows)
        chosen = topk_experts(scores, k)
        self.moved("order", lambda: sort_by_expert(chosen, EXPERTS), 6 * self.rows)
        flat = chosen.flatten()
        self.moved("order plain (argsort)", lambda: flat.argsort(stable=True), 6 * self.rows)
        places, _ = sort_by_expert(chosen, EXPERTS)
        rows, weights = self.random(self.rows, hidden), torch.rand(self.tokens, k, device=self.device)
        one = self.tokens * hidden
        self.moved("spread", lambda: dispatch(x, places, self.rows), (1 + k) * one)
        self.moved("spread's gradient (collect)", lambda: combine(rows, places), (1 + k) * one)
        self.moved("weigh", lambda: combine_weighted(rows, places, weights), (1 + k) * one)
        self.moved("weigh's gradients", lambda: combine_weighted_backward(x, rows, places, weights), (1 + 2 * k) * one)
        order = flat.argsort(stable=True)

        def copies() -> Tensor:
            return x[:, None].expand(-1, k, -1).reshape(self.rows, -1).index_select(0, order)

        def back() -> Tensor:
            return (rows.index_select(0, order).view(self.tokens, k, -1) * weights[..., None].to(x.dtype)).sum(1)

        self.moved("spread plain", copies, (1 + k) * one)
        self.moved("weigh plain", back, (1 + k) * one)

    def gemms(self) -> None:
        """Grouped products forward and backward beside one dense product of as many operations."""
        hidden, width = self.config.hidden, self.config.expert_ffn
        shares = torch.rand(EXPERTS, device=self.device).softmax(0)  # uneven, as routers are
        ends = (shares.cumsum(0) * self.rows).to(torch.int32)
        ends[-1] = self.rows
        for name, deep, columns in (("gate and up", hidden, 2 * width), ("down", width, hidden)):
            x, grad = self.random(self.rows, deep), self.random(self.rows, columns)
            weight = self.random(EXPERTS, columns, deep)
            one = weight[0].contiguous()
            for which, grouped, dense in (
                ("forward", partial(F.grouped_mm, x, weight.mT, offs=ends), partial(torch.mm, x, one.mT)),
                ("to input", partial(F.grouped_mm, grad, weight, offs=ends), partial(torch.mm, grad, one)),
                ("to weight", partial(F.grouped_mm, grad.mT, x, offs=ends), partial(torch.mm, grad.mT, x)),
            ):
                floor = self.watch.seconds(dense)
                flops = 2.0 * self.rows * deep * columns
                self.told(f"{name}, {which}", grouped, floor, "a dense product", dense_tflops=flops / floor / 1e12)
        held = torch.randn(EXPERTS, width, hidden, device=self.device)
        self.moved("a weight cast", lambda: held.to(torch.bfloat16), 3 * held.numel())

    def layer(
        self, part: str, module: nn.Module, total: Callable[[Any], Tensor], floors: tuple[float, ...], bound: str
    ) -> tuple[float, ...]:
        """A compiled module, forward and with its backward pass."""
        x = self.random(self.micro, self.length, self.config.hidden).requires_grad_()
        compiled = torch.compile(module)

        def both() -> None:
            total(compiled(x)).backward()
            x.grad = None
            for parameter in module.parameters():
                parameter.grad = None

        def ahead() -> None:
            with torch.no_grad():
                compiled(x)

        seconds = (
            self.told(f"{part}, forward", ahead, floors[0], bound),
            self.told(f"{part}, forward and backward", both, floors[1], bound),
        )
        torch._dynamo.reset()
        return seconds

    def layers(self) -> None:
        """A whole mixture beside the dense layer of the same operations, and that beside its products."""
        mixture = moe.MoE(self.config).to(self.device)
        dense = FeedForward(self.dense, self.dense.ffn).to(self.device)
        for module in (mixture, dense):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.02)
        x, weight = self.random(self.tokens, self.dense.hidden), self.random(self.dense.hidden, self.dense.ffn)
        gemm = self.watch.seconds(lambda: x @ weight)
        floors = self.layer("dense layer", dense, lambda out: out.sum(), (3 * gemm, 9 * gemm), "its products")
        self.layer("mixture", mixture, lambda out: out[0].sum(), floors, "the dense layer")
        with without_kernels():
            self.layer("mixture plain", mixture, lambda out: out[0].sum(), floors, "the dense layer")


def main() -> int:
    """Compare whole runs, or time the pieces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatch", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="also the mixture without its kernels")
    parser.add_argument("--parts", action="store_true", help="the pieces of a layer alone")
    parser.add_argument("--device", default="cuda")
    for name, size in dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, seq_len=4096).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpu()
    if not args.parts:
        return compare(args)
    for micro in args.microbatch:
        pieces = Pieces(args, micro)
        pieces.layers()
        pieces.gemms()
        pieces.routing()
    return 0


if __name__ == "__main__":
    sys.exit(main())
