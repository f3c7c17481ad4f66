"""One step of this trainer taken apart by its kernels, and what each part would take alone on the same GPU.

Matrix products: every product of the step, with its shape, as cuBLAS runs it alone, one after the other without a pause.
Attention: forward and backward of all layers by the fastest backend. Everything else moves memory: the bytes that must be read
and written at least once, at the bandwidth of a large copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from shapes import our_run
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.measure.verify import random_batch
from shardwise.plan.cost.flops import parameters
from shardwise.run.derive import chunk_rows
from shardwise.trace.kernel_names import category_of
from shardwise.train.step import TrainState


def milliseconds(work: Callable[[], Any], times: int = 7) -> float:
    """The median by CUDA events."""
    taken = []
    for n in range(times + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if n >= 2:
            taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def random(*shape: int) -> torch.Tensor:
    """Numbers like those of a network, in bfloat16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.1


def linear(rows: int, out: int, inner: int) -> float:
    """Forward and backward of one product, each in the faster of the two ways a matrix can be laid out."""
    x, w, dy = random(rows, inner), random(out, inner), random(rows, out)
    turned = w.mT.contiguous().mT
    return sum(
        min(milliseconds(one), milliseconds(other))
        for one, other in (
            (lambda: F.linear(x, w), lambda: F.linear(x, turned)),
            (lambda: dy @ w, lambda: dy @ turned),
            (lambda: dy.mT @ x, lambda: x.mT @ dy),
        )
    )


def gemms(shape: dict[str, int], tokens: int) -> float:
    """All matrix products of a step, forward and both of the backward pass."""
    hidden, ffn, layers = shape["hidden"], shape["ffn"], shape["layers"]
    keys = shape["kv_heads"] * (hidden // shape["heads"])
    rows = chunk_rows(tokens, 2 * shape["vocab"])
    total = 0.0
    for m, n, k, count in (
        (tokens, hidden, hidden, 2 * layers),
        (tokens, keys, hidden, 2 * layers),
        (tokens, ffn, hidden, 2 * layers),
        (tokens, hidden, ffn, layers),
        (rows, shape["vocab"], hidden, tokens / rows),
    ):
        total += count * linear(m, n, k)
    return total


def attention(shape: dict[str, int], batch: int, seq: int) -> dict[str, float]:
    """Attention of all layers, forward and backward, by backend."""
    found = {}
    width = shape["hidden"] // shape["heads"]
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        q, k, v = (
            random(batch, seq, heads, width).transpose(1, 2).requires_grad_()
            for heads in (shape["heads"], shape["kv_heads"], shape["kv_heads"])
        )
        dy = random(batch, seq, shape["heads"], width).transpose(1, 2)

        def both(q: Any = q, k: Any = k, v: Any = v, dy: Any = dy) -> None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, (q, k, v), dy)

        with sdpa_kernel(backend):
            found[backend.name.lower()] = shape["layers"] * milliseconds(both)
    return found


def moved(shape: dict[str, int], tokens: int) -> float:
    """Bytes that what is neither product nor attention reads and writes at least: the streams of norms, rotation, gate and
    residual, forward and backward, the scores of the vocabulary, the casts of the parameters and their gradients, the optimizer."""
    hidden, ffn, layers = shape["hidden"], shape["ffn"], shape["layers"]
    keys = shape["kv_heads"] * (hidden // shape["heads"])
    norm = 2 * (
        4 * hidden + 5 * hidden
    )  # stream and branch in, stream and norm out; back: two gradients and the stream in
    turn = 2 * 2 * (hidden + keys)
    gate = 3 * ffn + 5 * ffn
    streams = 2.0 * tokens * layers * (norm + turn + gate)
    scores = 2.0 * tokens * shape["vocab"] * 2
    every = parameters(our_run(shape, 1, 128, {}).model).total
    inside = every - 2 * shape["vocab"] * hidden
    return streams + scores + inside * (6 + 6) + every * (4 + 28)


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / milliseconds(lambda: y.copy_(x)) * 1e3


def taken_apart(shape: dict[str, int], batch: int, seq: int) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel, from a profile of three; and those in which no kernel ran."""
    run = our_run(shape, batch, seq, {})
    train_state = TrainState(run)
    data = random_batch(run)
    for _ in range(4):
        train_state.train_step(data)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            train_state.train_step(data)
        torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    result = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
    for start, end, name in kernels:
        result[category_of(name)] += (end - start) / 3e3
    span = (max(k[1] for k in kernels) - min(k[0] for k in kernels)) / 3e3
    result["idle"] = span - sum(result.values())
    return result


def split(shape: dict[str, int], batch: int, seq: int) -> dict[str, Any]:
    """The parts of a step, measured and at their floor, in milliseconds."""
    measured = taken_apart(shape, batch, seq)
    torch.cuda.empty_cache()
    by_backend = attention(shape, batch, seq)
    speed = bandwidth()
    floor = {
        "matmul": gemms(shape, batch * seq),
        "attention": min(by_backend.values()),
        "memory": moved(shape, batch * seq) / speed * 1e3,
        "idle": 0.0,
    }
    return {
        "case": "split",
        "measured": measured,
        "floor": floor,
        "attention_by_backend": by_backend,
        "bandwidth_gbs": speed / 1e9,
    }
