"""How long a network's elementwise operations between its GEMMs really take: norms, rope, activations and the loss.

To the planner they are bytes at the speed of a copy. Here each runs as the model has it, forward and backward, and is recorded
beside the bytes that the planner counts for it, which shows what a norm of many small operations or a CPU's exponentials cost
beyond a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.measure.bench_kernels import Allowance, Point, Stopwatch
from shardwise.model.layers import Norm, at_least_float32
from shardwise.model.rope import apply_rope, rope_cos_sin
from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.operations import head, layer
from shardwise.run import Run, run_from_dict


def elementwise_run(device: torch.device, tokens: int, hidden: int, vocab: int) -> Run:
    """A run with a layer of such sizes, in the format that training on this device has."""
    model = dict(layers=1, hidden=hidden, heads=hidden // 32, ffn=3 * hidden, vocab=vocab)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    train = dict(steps=1, seq_len=tokens, global_batch=1, microbatch=1, dtype=dtype, device=device.type)
    return run_from_dict(dict(model=model, train=train, cluster=dict(chip="cpu")))


def operations(run: Run, device: torch.device) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """By the planner's names: an operation of the model, and what it is given."""
    m, tokens = run.model, run.train.seq_len
    dtype = getattr(torch, run.train.dtype)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    norm = Norm(m.hidden, m.norm_eps).to(device)
    torch.nn.init.ones_(norm.weight)
    turn = rope_cos_sin(m, torch.arange(tokens, device=device)[None], dtype)
    targets = torch.randint(m.vocab, (tokens,), device=device)
    heads = m.heads + m.kv_heads
    return {
        "norm": (norm, (numbers(1, tokens, m.hidden),)),
        "rotary": (lambda x: apply_rope(x, turn), (numbers(1, tokens, heads, m.head_dim),)),
        "activation": (lambda gate, up: F.silu(gate) * up, (numbers(tokens, m.ffn), numbers(tokens, m.ffn))),
        "loss": (
            lambda logits: F.cross_entropy(at_least_float32(logits), targets, reduction="sum"),
            (numbers(tokens, m.vocab),),
        ),
    }


def elementwise_points(watch: Stopwatch, allowance: Allowance, quick: bool) -> list[Point]:
    """Each operation, forward and backward, from little work to much."""
    device = watch.device
    sizes = [(16, 64, 128), (512, 128, 512), (1024, 256, 4096)]
    if device.type == "cuda":
        sizes = [(512, 512, 4096), (4096, 2048, 32768), (16384, 4096, 32768)]
    cases = [
        (size, name) for size in (sizes[:2] if quick else sizes) for name in ("norm", "rotary", "activation", "loss")
    ]
    points: list[Point] = []
    for (size, name), most in allowance.each(cases):
        run = elementwise_run(device, *size)
        job = job_of(run)
        op = next(op for op in (*layer(job, routed=False), *head(job)) if op.name == name)
        work, given = operations(run, device)[name]
        for direction, seconds in _both(watch, work, given, most).items():
            moved = float(op.bytes[direction == "backward"])
            points.append(
                dict(operation=name, direction=direction, dtype=run.train.dtype, bytes=moved, seconds=seconds,
                     gbs=moved / seconds / 1e9)
            )  # fmt: skip
    return points


def _both(watch: Stopwatch, work: Callable[..., Tensor], given: tuple[Tensor, ...], most: float) -> dict[str, float]:
    out = work(*given)
    grad = torch.ones_like(out)
    return {
        "forward": watch.seconds(lambda: work(*given), most / 2),
        "backward": watch.seconds(lambda: torch.autograd.grad(out, given, grad, retain_graph=True), most / 2),
    }
