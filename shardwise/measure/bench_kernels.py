"""How fast this device multiplies, attends and copies: the points of a hardware profile.

Every point is the median of several timings after a warm-up. A GPU's are taken between two events with its cache emptied
before each, so that inputs come from memory as they do in a step, and with work queued ahead, so that the host's launch is
not in them. A CPU's are taken on the wall clock, with the threads that training would have, and hold what calling an
operation costs: there the host is the device.
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
"""Seconds of one timing on a CPU: quicker work is repeated to fill them, since the clock and the scheduler are not finer."""
SLOW = 20.0
"""A format that a small GEMM shows to be so many times slower than float32 is emulated, and is left out."""


@dataclass
class Stopwatch:
    """Times work on a device."""

    device: torch.device
    samples: int = 5

    def __post_init__(self) -> None:
        self._flush: Tensor | None = None
        if self.device.type == "cuda":
            cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or 64 * 2**20
            # Long enough to run, too, for the host to queue what comes after it.
            self._flush = torch.empty(max(4 * cache, 2**28), dtype=torch.int8, device=self.device)

    def seconds(self, work: Work, most: float = 1.0) -> float:
        """Median seconds of `work`, within about `most` seconds of measuring but never without a warm-up."""
        return self._on_cuda(work, most) if self.device.type == "cuda" else self._on_cpu(work, most)

    def _on_cpu(self, work: Work, most: float) -> float:
        work()
        once = _wall(work)
        repeats = max(1, min(1000, int(SHORTEST / once)))
        samples = max(2, min(self.samples, int(most / (once * repeats))))
        timed = [_wall(lambda: [work() for _ in range(repeats)]) / repeats for _ in range(samples)]
        return statistics.median([*timed, once] if repeats == 1 else timed)

    def _on_cuda(self, work: Work, most: float) -> float:
        for _ in range(3):
            work()
        once = self._between_events(work)
        samples = max(3, min(2 * self.samples, int(most / (once + 5e-4))))
        return statistics.median(self._between_events(work) for _ in range(samples))

    def _between_events(self, work: Work) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        assert self._flush is not None
        for _ in range(4):
            self._flush.zero_()
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
class Allowance:
    """Seconds that a kind of point may take, dealt out evenly over the points still to come."""

    seconds: float
    progress: Callable[[float], None] = lambda share: None
    """Gets the share of the points that is done."""

    def each(self, cases: Iterable[Any]) -> Iterator[tuple[Any, float]]:
        """Every case with the seconds it may take, until the allowance is spent."""
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
    """The formats GEMMs are measured in: those that the device has instructions for, or is not much slower in."""
    if device.type == "cuda":
        names = ["float32", "float16"]
        if torch.cuda.is_bf16_supported(including_emulation=False):
            names.insert(0, "bfloat16")
        return [*names, "fp8"] if torch.cuda.get_device_capability(device) >= (8, 9) else names
    watch = Stopwatch(device, samples=3)
    trial = {
        name: watch.seconds(_product(256, 256, 256, name, device), 0.05) for name in ("float32", "bfloat16", "float16")
    }
    return [name for name, seconds in trial.items() if seconds < SLOW * trial["float32"]]


def _random(*shape: int, dtype: str, device: torch.device) -> Tensor:
    numbers = torch.randn(*shape, device=device)
    return numbers.to(FP8 if dtype == "fp8" else getattr(torch, dtype))


def _product(m: int, n: int, k: int, dtype: str, device: torch.device) -> Work:
    """A layer's GEMM: m rows of k by a weight stored [n, k]."""
    x, weight = _random(m, k, dtype=dtype, device=device), _random(n, k, dtype=dtype, device=device)
    if dtype == "fp8":
        one = torch.ones((), device=device)
        return lambda: scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16)
    return lambda: F.linear(x, weight)


def gemm_shapes(cuda: bool, quick: bool) -> list[tuple[int, int, int]]:
    """Rows, columns and depth: a grid that holds layers' GEMMs, their weights' gradients, skinny ones and few rows;
    then those of known models. Sizes are mixed, so that an allowance that ends early has seen all kinds."""
    sides: tuple[int, ...] = (256, 1024, 4096, 16384) if cuda else (32, 128, 512, 2048)
    if quick:
        sides = sides[:3]
    most = 2**40 if cuda else 2**31
    grid = [(m, n, k) for m, n, k in itertools.product(sides, sides, sides) if m * n * k <= most]
    grid.sort(key=lambda shape: (shape[0] * 7 + shape[1] * 3 + shape[2]) % 11)
    few = (1, 16) if quick else (1, 16, 64)
    wide = sides[-1] if quick else sides[-2]
    grid += [(rows, wide, wide) for rows in few] + [(rows, 4 * wide, wide) for rows in few]
    if quick:
        return grid
    # GPT-2's layer; Llama's of 8 and 70 billion: queries with keys and values, gate with up, down.
    known = (
        [(768, 3072), (3072, 768)]
        if not cuda
        else [(6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (8192, 28672)]
    )
    return grid + [(rows, n, k) for n, k in known for rows in ((2048, 8192) if cuda else (128, 512))]


def gemm_points(watch: Stopwatch, allowance: Allowance, dtypes: Iterable[str], quick: bool) -> list[Point]:
    """GEMMs in each format."""
    names = list(dtypes)
    cases = [(shape, name) for shape in gemm_shapes(watch.device.type == "cuda", quick) for name in names]
    points = []
    for ((m, n, k), dtype), most in allowance.each(cases):
        if dtype == "fp8" and (n % 16 or k % 16):
            continue
        seconds = watch.seconds(_product(m, n, k, dtype, watch.device), most)
        points.append(dict(m=m, n=n, k=k, dtype=dtype, seconds=seconds, tflops=2e-12 * m * n * k / seconds))
    return points


def grouped_points(watch: Stopwatch, allowance: Allowance, dtypes: Iterable[str], quick: bool) -> list[Point]:
    """Rows dealt out evenly over experts with a matrix each, by the code that the model has for it."""
    from shardwise.model.moe import grouped_linear

    cuda = watch.device.type == "cuda"
    widths = ((4096, 1536), (2048, 7168)) if cuda else ((128, 256), (512, 512))
    rows = ((1024, 16384) if quick else (1024, 8192, 32768)) if cuda else ((64, 1024) if quick else (64, 512, 2048))
    cases = itertools.product(rows, widths, (8, 64) if cuda else (4, 16), [d for d in dtypes if d != "fp8"])
    points = []
    for (tokens, (n, k), experts, dtype), most in allowance.each(cases):
        x = _random(tokens, k, dtype=dtype, device=watch.device)
        weight = _random(experts, n, k, dtype=dtype, device=watch.device)
        counts = torch.full((experts,), tokens // experts, device=watch.device)
        seconds = watch.seconds(lambda x=x, w=weight, c=counts: grouped_linear(x, w, c), most)  # type: ignore[misc]
        points.append(
            dict(tokens=tokens, n=n, k=k, experts=experts, dtype=dtype, seconds=seconds,
                 tflops=2e-12 * tokens * n * k / seconds)
        )  # fmt: skip
    return points


def memory_points(watch: Stopwatch, allowance: Allowance, quick: bool) -> list[Point]:
    """An elementwise operation by the bytes it reads and writes."""
    cuda = watch.device.type == "cuda"
    top = (30 if quick else 32) if cuda else (24 if quick else 28)
    points = []
    for power, most in allowance.each(range(12, top + 1, 2)):
        moved = 2**power
        x = torch.randn(moved // 8, device=watch.device)
        result = torch.empty_like(x)
        seconds = watch.seconds(lambda x=x, y=result: torch.neg(x, out=y), most)  # type: ignore[misc]
        points.append(dict(bytes=moved, seconds=seconds, gbs=moved / seconds / 1e9))
    return points


def attention_shapes(cuda: bool, quick: bool) -> list[tuple[int, int, int, int]]:
    """Batch, heads, length and width of a head."""
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
    """Which implementation PyTorch takes for causal attention of this shape, as it does in training."""
    return SDPBackend(fused_sdp_choice(q, q, q, is_causal=True))


def attention_points(watch: Stopwatch, allowance: Allowance, dtypes: Iterable[str], quick: bool) -> list[Point]:
    """Causal attention, forward and backward, by the implementation training takes; on a GPU also by the other one."""
    cuda = watch.device.type == "cuda"
    half = [d for d in dtypes if d in ("bfloat16", "float16")]
    formats = half if cuda else ["float32", *[d for d in half if d == "bfloat16"]]
    points = []
    for ((batch, heads, length, width), dtype), most in allowance.each(
        itertools.product(attention_shapes(cuda, quick), formats)
    ):
        shape = (batch, length, heads, width)
        # Laid out [batch, sequence, heads, width], as the model has them.
        q, k, v = (_random(*shape, dtype=dtype, device=watch.device).transpose(1, 2).requires_grad_() for _ in range(3))
        usual = chosen_backend(q)
        others = [b for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if b != usual] if cuda else []
        for backend in (usual, *others):
            times = _attention_seconds(watch, q, k, v, backend, most / (1 + len(others)))
            for direction, seconds in times.items():
                flops = attention_flops(batch, heads, length, length, width, direction=direction)  # type: ignore[arg-type]
                points.append(
                    dict(batch=batch, heads=heads, queries=length, keys=length, head_dim=width, causal=True,
                         kernel=kernel_name(backend), direction=direction, dtype=dtype,
                         backend=backend.name.lower(), seconds=seconds, tflops=float(flops) / seconds / 1e12)
                )  # fmt: skip
    return points


def kernel_name(backend: SDPBackend) -> Kernel:
    """What the planner calls it: cuDNN's is its "flash3", and any other that PyTorch takes stands for FlashAttention-2."""
    return "flash3" if backend == SDPBackend.CUDNN_ATTENTION else "flash2"


def _attention_seconds(
    watch: Stopwatch, q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend, most: float
) -> dict[str, float]:
    """Seconds by direction; none where this implementation does not take the shape."""
    try:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            grad = torch.randn_like(out)

            def forward() -> object:
                with torch.no_grad():
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            def backward() -> object:
                return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

            return {"forward": watch.seconds(forward, 0.3 * most), "backward": watch.seconds(backward, 0.7 * most)}
    except RuntimeError:
        return {}


def kernel_seconds(device: torch.device) -> float:
    """What a tiny operation takes when they follow each other: on a GPU, the host's time to launch one."""
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
    """What the device is called, and its name in the catalogue of chips; "" where it has none."""
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
