"""Benchmarks GEMMs, attention and copies on this device: the points of a hardware profile.

Every point is the median of several timings after a warm-up. On a GPU a timing lies between two events. The L2 cache is flushed
first, so that inputs come from memory as they do in a step, and work is queued ahead, so that the launch is not included. On a CPU
timings are wall-clock times, with as many threads as training, and include the cost of the call.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.hardware import CHIPS, attention_flops
from shardwise.hardware.attention import Kernel
from shardwise.torch_private import fused_sdp_choice, scaled_mm

Point = dict[str, Any]
Work = Callable[[], object]

FP8 = torch.float8_e4m3fn
SHORTEST = 2e-4
"""Least seconds of one timing on a CPU: shorter work is repeated, since clock and scheduler have no finer resolution."""
SLOW = 20.0
"""A dtype whose small GEMM is this many times slower than float32's is emulated, and is not measured."""


@dataclass
class Stopwatch:
    """Times work on a device."""

    device: torch.device
    samples: int = 5

    def __post_init__(self) -> None:
        self._flush: Tensor | None = None
        if self.device.type == "cuda":
            cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or 64 * 2**20
            # Zeroing it also takes long enough for the host to queue the work that follows.
            self._flush = torch.empty(max(4 * cache, 2**28), dtype=torch.int8, device=self.device)

    def seconds(self, work: Work, budget: float = 1.0) -> float:
        """Median seconds of `work`, measured in about `budget` seconds; there is always a warm-up."""
        return self._on_cuda(work, budget) if self.device.type == "cuda" else self._on_cpu(work, budget)

    def _on_cpu(self, work: Work, budget: float) -> float:
        work()
        once = _wall(work)
        repeats = max(1, min(1000, int(SHORTEST / once)))
        samples = max(2, min(self.samples, int(budget / (once * repeats))))
        timed = [_wall(lambda: [work() for _ in range(repeats)]) / repeats for _ in range(samples)]
        return statistics.median([*timed, once] if repeats == 1 else timed)

    def _on_cuda(self, work: Work, budget: float) -> float:
        for _ in range(3):
            work()
        once = self._between_events(work)
        samples = max(3, min(2 * self.samples, int(budget / (once + 5e-4))))
        return statistics.median(self._between_events(work) for _ in range(samples))

    def _between_events(self, work: Work) -> float:
        assert self._flush is not None
        for _ in range(4):
            self._flush.zero_()
        return event_seconds(work)


def event_seconds(work: Work) -> float:
    """Seconds of `work` on the GPU, between two events of the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _wall(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass
class TimeBudget:
    """Seconds for one kind of point, divided evenly among the points still to be measured."""

    seconds: float
    progress: Callable[[float], None] = lambda share: None
    """Called with the fraction of points done."""

    def each(self, cases: Iterable[Any]) -> Iterator[tuple[Any, float]]:
        """Each case with the seconds it may take, until the budget is spent."""
        every = list(cases)
        ends = time.perf_counter() + self.seconds
        for done, case in enumerate(every):
            self.progress(done / len(every))
            left = ends - time.perf_counter()
            if left <= 0:
                break
            yield case, left / (len(every) - done)
        self.progress(1.0)


def dtypes_of(device: torch.device) -> list[str]:
    """The dtypes in which GEMMs are measured: those the device has instructions for, or is not much slower in."""
    if device.type == "cuda":
        names = ["float32", "float16"]
        if torch.cuda.is_bf16_supported(including_emulation=False):
            names.insert(0, "bfloat16")
        return [*names, "fp8"] if torch.cuda.get_device_capability(device) >= (8, 9) else names
    watch = Stopwatch(device, samples=3)
    trial = {
        name: watch.seconds(_gemm(256, 256, 256, name, device), 0.05) for name in ("float32", "bfloat16", "float16")
    }
    return [name for name, seconds in trial.items() if seconds < SLOW * trial["float32"]]


def _random(*shape: int, dtype: str, device: torch.device) -> Tensor:
    values = torch.randn(*shape, device=device)
    return values.to(FP8 if dtype == "fp8" else getattr(torch, dtype))


def _gemm(m: int, n: int, k: int, dtype: str, device: torch.device) -> Work:
    """A layer's GEMM: m rows of k by a weight stored [n, k]."""
    x, weight = _random(m, k, dtype=dtype, device=device), _random(n, k, dtype=dtype, device=device)
    if dtype == "fp8":
        one = torch.ones((), device=device)
        return lambda: scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16)
    return lambda: F.linear(x, weight)


def gemm_shapes(cuda: bool, quick: bool) -> list[tuple[int, int, int]]:
    """m, n and k: a grid that covers layers, their weight gradients, skinny shapes and few rows; then layers of known models. The
    order mixes sizes, so that a budget that ends early has covered all kinds."""
    sides: tuple[int, ...] = (256, 1024, 4096, 16384) if cuda else (32, 128, 512, 2048)
    if quick:
        sides = sides[:3]
    largest = 2**40 if cuda else 2**31
    grid = [(m, n, k) for m, n, k in itertools.product(sides, sides, sides) if m * n * k <= largest]
    grid.sort(key=lambda shape: (shape[0] * 7 + shape[1] * 3 + shape[2]) % 11)
    few = (1, 16) if quick else (1, 16, 64)
    wide = sides[-1] if quick else sides[-2]
    grid += [(rows, wide, wide) for rows in few] + [(rows, 4 * wide, wide) for rows in few]
    if quick:
        return grid
    # GPT-2's layer on a CPU; Llama 8B's and 70B's on a GPU: QKV, gate and up, down.
    known = (
        [(768, 3072), (3072, 768)]
        if not cuda
        else [(6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (8192, 28672)]
    )
    return grid + [(rows, n, k) for n, k in known for rows in ((2048, 8192) if cuda else (128, 512))]


def gemm_points(watch: Stopwatch, budget: TimeBudget, dtypes: Iterable[str], quick: bool) -> list[Point]:
    """GEMMs in each dtype."""
    names = list(dtypes)
    cases = [(shape, name) for shape in gemm_shapes(watch.device.type == "cuda", quick) for name in names]
    points = []
    for ((m, n, k), dtype), seconds_each in budget.each(cases):
        if dtype == "fp8" and (n % 16 or k % 16):
            continue
        seconds = watch.seconds(_gemm(m, n, k, dtype, watch.device), seconds_each)
        points.append(dict(m=m, n=n, k=k, dtype=dtype, seconds=seconds, tflops=2e-12 * m * n * k / seconds))
    return points


def grouped_points(watch: Stopwatch, budget: TimeBudget, dtypes: Iterable[str], quick: bool) -> list[Point]:
    """Grouped GEMMs of experts with the same number of rows each, run by the model's own code."""
    from shardwise.model.moe.layer import grouped_linear

    cuda = watch.device.type == "cuda"
    widths = ((4096, 1536), (2048, 7168)) if cuda else ((128, 256), (512, 512))
    rows = ((1024, 16384) if quick else (1024, 8192, 32768)) if cuda else ((64, 1024) if quick else (64, 512, 2048))
    cases = itertools.product(rows, widths, (8, 64) if cuda else (4, 16), [d for d in dtypes if d != "fp8"])
    points = []
    for (tokens, (n, k), experts, dtype), seconds_each in budget.each(cases):
        x = _random(tokens, k, dtype=dtype, device=watch.device)
        weight = _random(experts, n, k, dtype=dtype, device=watch.device)
        counts = torch.full((experts,), tokens // experts, device=watch.device)
        seconds = watch.seconds(lambda x=x, w=weight, c=counts: grouped_linear(x, w, c), seconds_each)  # type: ignore[misc]
        points.append(
            dict(tokens=tokens, n=n, k=k, experts=experts, dtype=dtype, seconds=seconds,
                 tflops=2e-12 * tokens * n * k / seconds)
        )  # fmt: skip
    return points


def memory_points(watch: Stopwatch, budget: TimeBudget, quick: bool) -> list[Point]:
    """An elementwise operation, by the bytes it reads and writes."""
    cuda = watch.device.type == "cuda"
    top = (30 if quick else 32) if cuda else (24 if quick else 28)
    points = []
    for power, seconds_each in budget.each(range(12, top + 1, 2)):
        moved = 2**power
        x = torch.randn(moved // 8, device=watch.device)
        result = torch.empty_like(x)
        seconds = watch.seconds(lambda x=x, y=result: torch.neg(x, out=y), seconds_each)  # type: ignore[misc]
        points.append(dict(bytes=moved, seconds=seconds, gbs=moved / seconds / 1e9))
    return points


def attention_shapes(cuda: bool, quick: bool) -> list[tuple[int, int, int, int]]:
    """Batch, heads, sequence length and head width."""
    lengths: tuple[int, ...] = (1024, 4096, 16384) if cuda else (64, 256, 1024)
    if quick:
        lengths = lengths[:2]
    tokens = 16384 if cuda else 1024
    shapes = []
    for length in lengths:
        for batch in sorted({1, max(1, tokens // length)}):
            shapes += [
                (batch, heads, length, width)
                for heads, width in (((32, 128), (16, 64)) if cuda else ((4, 32), (8, 64)))
            ]
    return shapes


def chosen_backend(q: Tensor) -> SDPBackend:
    """The backend that PyTorch chooses for causal attention of this shape, as in training."""
    return SDPBackend(fused_sdp_choice(q, q, q, is_causal=True))


def attention_points(watch: Stopwatch, budget: TimeBudget, dtypes: Iterable[str], quick: bool) -> list[Point]:
    """Causal attention, forward and backward, with the backend that training uses; on a GPU also with the other fused one."""
    cuda = watch.device.type == "cuda"
    half = [d for d in dtypes if d in ("bfloat16", "float16")]
    formats = half if cuda else ["float32", *[d for d in half if d == "bfloat16"]]
    points = []
    for ((batch, heads, length, width), dtype), seconds_each in budget.each(
        itertools.product(attention_shapes(cuda, quick), formats)
    ):
        shape = (batch, length, heads, width)
        # Laid out [batch, sequence, heads, width], as in the model.
        q, k, v = (_random(*shape, dtype=dtype, device=watch.device).transpose(1, 2).requires_grad_() for _ in range(3))
        usual = chosen_backend(q)
        others = [b for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if b != usual] if cuda else []
        for backend in (usual, *others):
            times = _attention_seconds(watch, q, k, v, backend, seconds_each / (1 + len(others)))
            for direction, seconds in times.items():
                flops = attention_flops(batch, heads, length, length, width, direction=direction)  # type: ignore[arg-type]
                points.append(
                    dict(batch=batch, heads=heads, queries=length, keys=length, head_dim=width, causal=True,
                         kernel=kernel_name(backend), direction=direction, dtype=dtype,
                         backend=backend.name.lower(), seconds=seconds, tflops=float(flops) / seconds / 1e12)
                )  # fmt: skip
    return points


def kernel_name(backend: SDPBackend) -> Kernel:
    """The planner's name for a backend: cuDNN is "flash3", any other is FlashAttention-2."""
    return "flash3" if backend == SDPBackend.CUDNN_ATTENTION else "flash2"


def _attention_seconds(
    watch: Stopwatch, q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend, budget: float
) -> dict[str, float]:
    """Seconds by direction; empty if the backend does not support the shape."""
    try:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            grad = torch.randn_like(out)

            def forward() -> object:
                with torch.no_grad():
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            def backward() -> object:
                return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

            return {"forward": watch.seconds(forward, 0.3 * budget), "backward": watch.seconds(backward, 0.7 * budget)}
    except RuntimeError:
        return {}


def kernel_seconds(device: torch.device) -> float:
    """Seconds of a tiny operation, many back to back; on a GPU this is the host's time per kernel launch."""
    x = torch.ones(8, device=device)
    if device.type == "cpu":
        return Stopwatch(device).seconds(lambda: torch.neg(x), 0.1)
    samples = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(2000):
            torch.neg(x)
        torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) / 2000)
    return statistics.median(samples)


def machine_name(device: torch.device) -> tuple[str, str]:
    """The device's own name, and its name in the chip catalogue, "" if it is not listed."""
    from shardwise.hardware import chip_of_driver_name

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        chip = chip_of_driver_name(name)
        return name, chip.name if chip else ""
    return f"{_cpu_model()}, {torch.get_num_threads()} of {CHIPS['cpu'].units} cores", "cpu"


def _cpu_model() -> str:
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
