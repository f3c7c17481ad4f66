"""Times the steps of the serving engine on this machine, with its own runner on layers of random weights. From these points the
planner predicts the step time of any network.

A network of a few layers against one of a single layer shows the time of a layer; the rest is the head and sampling. Key counts,
sequence counts and prompt lengths are varied separately. On a GPU a step is timed on the device alone, behind queued work, and the
host is timed with steps of a network so small that the device waits for the host. On a CPU the two cannot be told apart; the host's
share is the engine's time outside of its runner.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shardwise.hardware import Profile
from shardwise.hardware.profile import LAYER, dump_profile
from shardwise.measure.bench.kernels import Point, Stopwatch, event_seconds
from shardwise.measure.bench.machine import Progress, empty_profile
from shardwise.measure.bench.tune_attention import tune_attention
from shardwise.measure.serve_load import own_runner, random_model, verify_load
from shardwise.run import Run, run_from_dict
from shardwise.serve.engine import Engine, engine_of
from shardwise.serve.request import Request, Sampling
from shardwise.serve.runner import Launched, Row, Runner

FEW, SAMPLES, SUSTAINED = 16, 4, 0.5
"""Keys of a sequence that hardly cost attention time; timings of which the minimum counts; seconds for which work is repeated."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """The cases to measure: layer shapes with a vocabulary each, and the sequences, keys and tokens of a step."""

    shapes: tuple[tuple[Shape, int], ...]
    layers: int
    sequences: tuple[int, ...]
    keys: tuple[int, ...]
    together: tuple[int, ...]
    """Tokens of a step with many short prompts."""
    alone: tuple[int, ...]
    """Tokens of a step with one prompt."""
    after: tuple[tuple[int, int], ...]
    """Tokens of a prompt's chunk, and the number of its tokens already in the KV cache."""
    mixed: tuple[tuple[int, int, int, int], ...]
    """Decoding sequences with so many keys each beside prompts of so many tokens: (sequences, keys, prompts, tokens)."""
    most_tokens: int
    """In the KV cache, over all sequences."""
    page_tokens: int
    short: int
    """Tokens of a short prompt."""
    check: tuple[Shape, int, int]
    """A network whose shape is not measured, its layers and vocabulary: a load on it shows the error of plans."""
    check_input: str
    check_output: str
    check_gib: float
    check_requests: int
    """Enough to take some seconds, so that a kernel that is loaded late does not matter."""
    reduced: tuple[str, ...] = ()
    """Other formats of the matrices (`serve.weights`): the first two shapes are measured in each."""
    many: int = 256
    """For timing the host: sequences of a step (`many`), tokens of two prompts (`prompts`), and the number of steps (`steps`)."""
    prompts: tuple[int, int] = (512, 2048)
    steps: int = 32


GPU = Grid(
    # Shapes of Llama 3 8B, 1B and 70B, and Qwen3 0.6B.
    (((4096, 14336, 32, 8, 128), 128256), ((2048, 8192, 32, 8, 64), 128256), ((8192, 28672, 64, 8, 128), 128256),
     ((1024, 3072, 16, 8, 128), 32768)),
    4, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (FEW, 512, 2048, 8192), (128, 512, 2048, 8192),
    (16, 32, 128, 512, 1024, 2048, 4096, 8192), ((512, 2048), (2048, 6144)),
    ((32, 512, 15, 512), (128, 512, 15, 512), (128, 2048, 3, 2048)), 2**20, 64, 64,
    ((3072, 8192, 24, 8, 128), 28, 128256), "U(50,600)", "U(20,120)", 8.0, 240,  # the shape of Llama 3.2 3B
    ("fp8", "int4", "int8"),
)  # fmt: skip
CPU = Grid(
    (((256, 768, 8, 4, 32), 4096), ((64, 128, 4, 2, 16), 256), ((512, 1536, 8, 4, 64), 4096)),
    3, (1, 4, 16, 64), (FEW, 128, 512), (64, 256, 1024), (16, 64, 256, 1024), ((64, 448), (256, 256)),
    ((4, 512, 1, 256), (16, 512, 4, 64)), 2**15, 16, 16,
    ((128, 384, 4, 2, 32), 4, 512), "U(5,120)", "U(2,30)", 0.25, 60, (), 64, (16, 256), 12,
)  # fmt: skip


def serving_run(shape: Shape, layers: int, vocab: int, device: torch.device, **serve: Any) -> Run:
    """A run with `layers` layers of this shape, and these engine settings."""
    model = dict(zip(LAYER, shape, strict=True)) | dict(layers=layers, vocab=vocab, max_positions=8192)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    train = dict(dtype=dtype, device=device.type, seq_len=128)
    return run_from_dict(dict(model=model, train=train, serve=dict(prefix_cache=False) | serve))


class Steps:
    """Times the steps of a runner."""

    def __init__(
        self, shape: Shape, layers: int, vocab: int, grid: Grid, device: torch.device, watch: DeviceWatch, weights: str = "auto"
    ) -> None:  # fmt: skip
        token = layers * 2 * shape[3] * shape[4] * (4 if device.type == "cpu" else 2)
        room = (grid.most_tokens + (max(grid.sequences) + 2) * grid.page_tokens) * token / 2**30
        run = serving_run(
            shape, layers, vocab, device, page_tokens=grid.page_tokens, max_sequences=max(grid.sequences), memory_gib=room,
            max_step_tokens=max(8192, *grid.sequences), weights=weights,
        )  # fmt: skip
        self.engine, self.grid, self.watch, self.vocab = engine_of(random_model(run), run), grid, watch, vocab
        self.runner = own_runner(self.engine)
        for pages in self.runner.cache.tensors():
            pages.normal_()  # all zeros would draw less power, and so take less time
        generator = torch.Generator().manual_seed(0)
        self.order = (torch.randperm(self.engine.pool.pages - 1, generator=generator) + 1).tolist()
        for slot in range(1, max(grid.sequences) + 1):
            self.runner.sampler.assign(slot, Sampling(0.6), slot, (), ())

    def decode(self, sequences: int, keys: int) -> float:
        """Seconds of a decode step of `sequences` sequences with `keys` keys each."""
        self._pages(sequences, keys)
        return self._seconds(self._decoding(sequences, keys))

    def prompts(self, prompts: int, tokens: int, before: int = 0) -> float:
        """Seconds of a prefill step of `prompts` prompts."""
        self._pages(prompts, before + tokens)
        return self._seconds(self._prompting(1, prompts, tokens, before))

    def mixed(self, sequences: int, keys: int, prompts: int, tokens: int) -> float:
        """Seconds of a step of both."""
        self._pages(sequences + prompts, max(keys, tokens))
        return self._seconds(self._decoding(sequences, keys) + self._prompting(sequences + 1, prompts, tokens, 0))

    def _decoding(self, sequences: int, keys: int) -> list[Row]:
        return [Row(slot, keys - 1, None, 1, 1) for slot in range(1, sequences + 1)]

    def _prompting(self, first: int, prompts: int, tokens: int, before: int) -> list[Row]:
        # Identical prompts would draw less power, and so take less time.
        made = torch.randint(self.vocab, (prompts, tokens), generator=torch.Generator().manual_seed(0)).tolist()
        return [Row(first + n, before, each, tokens, 1) for n, each in enumerate(made)]

    def _pages(self, sequences: int, tokens: int) -> None:
        """Assign scattered pages to the sequences."""
        each = -(-tokens // self.grid.page_tokens)
        pages = iter(self.order)
        slots = itertools.product(range(1, sequences + 1), range(each))
        self.runner.set_pages([(slot, n, next(pages)) for slot, n in slots])

    def _seconds(self, rows: list[Row]) -> float:
        return self.watch.seconds(lambda: self.runner.launch(rows).tokens)


class DeviceWatch:
    """Times work that the host launches. On a GPU the host's time is excluded: short work is launched while the device is busy with
    other work. Work that keeps the device busy is repeated for a while, since a warm chip reaches its power limit and slows."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.plain = device, Stopwatch(device, samples=3)
        self.busy = torch.empty(2**30 if device.type == "cuda" else 1, dtype=torch.int8, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of `work`, after a warm-up."""
        if self.device.type == "cpu":
            return self.plain.seconds(work, 0.05)
        for _ in range(2):
            work()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        work()
        host = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        alone = self._hidden(work, host)
        return self._sustained(work, alone) if alone > 1.5 * host else alone

    def _hidden(self, work: Callable[[], object], host: float) -> float:
        """The minimum of several timings, since disturbances only add time. Queued work in front takes longer than the host."""
        fill = self._between(lambda: self.busy.zero_())
        repeats = max(1, min(6, int(5e-3 / max(host, 1e-4))))
        ahead = 2 + int(2 * host * repeats / fill)
        return min(self._between(_times(work, repeats), ahead) for _ in range(SAMPLES)) / repeats

    def _sustained(self, work: Callable[[], object], once: float) -> float:
        """The mean of many repeats that together take a while, after the same number as a warm-up."""
        repeats = max(2, int(SUSTAINED / once))
        _times(work, repeats)()
        return self._between(_times(work, repeats)) / repeats

    def _between(self, work: Callable[[], object], ahead: int = 0) -> float:
        for _ in range(ahead):
            self.busy.zero_()
        return event_seconds(work)


def _times(work: Callable[[], object], repeats: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(repeats):
            work()

    return several


def shape_points(
    shape: Shape, vocab: int, weights: str, grid: Grid, device: torch.device, watch: DeviceWatch, done: Callable[[float], None]
) -> Iterator[tuple[str, Point]]:  # fmt: skip
    """The points of layers of one shape with their matrices in format `weights`, yielded as they are measured."""
    one, many = (Steps(shape, layers, vocab, grid, device, watch, weights) for layers in (1, grid.layers))
    whole = "float32" if device.type == "cpu" else "bfloat16"
    named = dict(zip(LAYER, shape, strict=True)) | dict(weights=whole if weights == "auto" else weights)
    picking: dict[int, float] = {}

    def layer_of(many: float, rows: int) -> float:
        return max(many - picking[rows], 0.02 * many) / grid.layers

    for n, sequences in enumerate(grid.sequences):
        done(0.5 * n / len(grid.sequences))
        alone, together = one.decode(sequences, FEW), many.decode(sequences, FEW)
        layer = max(together - alone, 0.02 * together) / (grid.layers - 1)
        picking[sequences] = max(alone - layer, 0.02 * alone)
        yield (
            "pick",
            dict(rows=sequences, hidden=shape[0], vocab=vocab, weights=named["weights"], seconds=picking[sequences]),
        )
        for keys in grid.keys:
            if keys == FEW or sequences * keys <= grid.most_tokens:
                seconds = together if keys == FEW else many.decode(sequences, keys)
                yield "decode", named | dict(sequences=sequences, keys=keys, seconds=layer_of(seconds, sequences))
    prompts = [(tokens // grid.short, grid.short, 0) for tokens in grid.together]
    prompts += [(1, tokens, 0) for tokens in grid.alone] + [(1, *each) for each in grid.after]
    for n, (count, tokens, before) in enumerate(prompts):
        done(0.5 + 0.5 * n / len(prompts))
        # The last layer computes less, also in a network of one layer, so the difference consists of full layers.
        alone, together = one.prompts(count, tokens, before), many.prompts(count, tokens, before)
        seconds = max(together - alone, 0.02 * together) / (grid.layers - 1)
        yield "prompt", named | dict(prompts=count, tokens=tokens, keys=before + tokens, seconds=seconds)
    for sequences, keys, count, tokens in grid.mixed:
        alone, together = (steps.mixed(sequences, keys, count, tokens) for steps in (one, many))
        seconds = max(together - alone, 0.02 * together) / (grid.layers - 1)
        yield "mixed", named | dict(sequences=sequences, keys=keys, prompts=count, tokens=tokens, seconds=seconds)


TINY: Shape = (128, 256, 4, 2, 32)


class Host:
    """The host's seconds per step, from engines with networks so small that only the host's time counts. What else a machine does
    only adds time, some of it for minutes, so `measure` is called some time apart, and the shortest times count."""

    def __init__(self, device: torch.device, grid: Grid) -> None:
        self.device, self.grid = device, grid
        self.shortest: dict[str, float] = {}

    def measure(self) -> None:
        """Time steps of each kind."""
        few, more = self.grid.prompts
        many, small, deep = self._decoding(self.grid.many), self._prompts(2, few), self._prompts(10, few)
        found = dict(alone=self._decoding(1), together=many, small=small, deep=deep, long=self._prompts(2, more))
        for name, seconds in (found | dict(arrival=self._arrival())).items():
            self.shortest[name] = min(seconds, self.shortest.get(name, seconds))

    def facts(self) -> dict[str, Any]:
        """The host's times, by the field names of a profile."""
        few, more = self.grid.prompts
        alone, together, small, deep, long, arrival = self.shortest.values()
        sequence = max(together - alone, 0.0) / (self.grid.many - 1)
        layer, token = max(deep - small, 0.0) / 8, max(long - small, 0.0) / (more - few)
        return dict(
            serve_step=max(alone - sequence, 1e-7), serve_sequence=sequence, serve_layer=layer, serve_token=token,
            serve_mixed=max(small - 2 * layer - few * token, 1e-7), serve_arrive=arrival,
        )  # fmt: skip

    def _arrival(self) -> float:
        """Seconds that HTTP adds to a request; 0 if the server's packages are not installed."""
        if not all(map(find_spec, ("starlette", "uvicorn", "jinja2", "httptools"))):
            return 0.0
        from shardwise.measure.bench.random_server import arrival_seconds

        return arrival_seconds(self._engine(2, max_sequences=4))

    def _engine(self, layers: int, **serve: Any) -> Engine:
        run = serving_run(TINY, layers, 512, self.device, memory_gib=0.25, **serve)
        return engine_of(random_model(run), run)

    def _decoding(self, sequences: int) -> float:
        """Seconds of a step in which `sequences` sequences decode."""
        engine = self._engine(2, max_sequences=sequences)
        engine.warm()
        tokens = self.grid.steps + 8
        asked = [Request(f"{n}", (1,) * 8, tokens, Sampling(0.6), ignore_end=True) for n in range(sequences)]
        return self._per_step(engine, asked)

    def _prompts(self, layers: int, tokens: int) -> float:
        """Seconds of a step with one prompt only."""
        engine = self._engine(layers, max_sequences=16, max_step_tokens=max(16, tokens))
        count = self.grid.steps + 8
        asked = [Request(f"{n}", (1,) * tokens, 1, Sampling(0.6), ignore_end=True) for n in range(count)]
        return self._per_step(engine, asked)

    def _per_step(self, engine: Engine, requests: Iterable[Request]) -> float:
        skipped, steps = 4, self.grid.steps
        runner = TimedRunner(own_runner(engine))
        if not engine.runner.gpu:
            engine.runner = runner  # type: ignore[assignment]
        found = []
        for _ in range(3):
            for request in requests:
                engine.add(request)
            for _ in range(skipped):
                engine.step()
            start, runner.seconds = time.perf_counter(), 0.0
            for _ in range(steps):
                engine.step()
            found.append((time.perf_counter() - start - runner.seconds) / steps)
            while not engine.idle:
                engine.step()
        return min(found)


class TimedRunner:
    """A runner that adds up its compute time."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.seconds = runner, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, *arguments: Any) -> Launched:
        """Launch a step, and add its time."""
        start = time.perf_counter()
        launched = self._runner.launch(*arguments)
        self.seconds += time.perf_counter() - start
        return launched


def measure_serving(
    device: torch.device, seconds: float, progress: Progress = lambda what, share: None, grid: Grid | None = None
) -> Profile:
    """A profile of the serving engine's steps on a device. The first shape is always measured; the other shapes, and packed
    matrices, as long as there is time."""
    torch.manual_seed(0)
    ends = time.perf_counter() + seconds
    grid, gpu = grid or (CPU if device.type == "cpu" else GPU), device.type == "cuda"
    found: dict[str, list[Point]] = {"decode": [], "prompt": [], "mixed": [], "pick": []}
    watch = DeviceWatch(device)
    if gpu:
        progress("attention", 0.0)
        tune_attention([(shape[2], shape[3], shape[4]) for shape, _ in grid.shapes[:2]], device)
    host, began = Host(device, grid), time.perf_counter()
    host.measure()
    ends -= time.perf_counter() - began  # it is measured once more
    first, rest = grid.shapes[:2], grid.shapes[2:]
    cells = [(each, weights) for weights in ("auto", *grid.reduced) for each in first]
    for n, ((shape, vocab), weights) in enumerate([*cells, *((each, "auto") for each in rest)]):
        took = time.perf_counter()
        for kind, point in shape_points(
            shape, vocab, weights, grid, device, watch, partial(progress, f"steps {n + 1}")
        ):
            found[kind].append(point)
        progress(f"steps {n + 1}", 1.0)
        now = time.perf_counter()
        if now + (now - took) > ends:
            break
        if gpu:
            torch.cuda.empty_cache()
    host.measure()
    measured: dict[str, Any] = {kind: tuple(points) for kind, points in found.items()} | host.facts()
    profile = replace(empty_profile(device), **measured)
    if not profile.chip:
        return profile
    progress("check", 0.0)
    return checked(profile, grid, device)


def checked(profile: Profile, grid: Grid, device: torch.device) -> Profile:
    """The profile with its own error: a load on a network of another shape is planned with it and measured. Library memory is what
    an engine that has served a load takes on the device beside its tensors."""
    shape, layers, vocab = grid.check
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps(dump_profile(profile)))
        run = serving_run(
            shape, layers, vocab, device, concurrency=24, requests=grid.check_requests, input_tokens=grid.check_input,
            memory_gib=grid.check_gib, output_tokens=grid.check_output, page_tokens=grid.page_tokens,
        )  # fmt: skip
        verdict = verify_load(replace(run, cluster=replace(run.cluster, chip=profile.chip, profile=str(path))))
    judged = ("output tokens/s", "tpot p50")  # the error is one of speeds
    error = max(abs(each.relative) for each in verdict.differences if each.name in judged)
    if device.type != "cuda":
        return replace(profile, serve_error=error)
    free, total = torch.cuda.mem_get_info(device)
    taken = float(total - free - torch.cuda.memory_reserved(device))
    return replace(profile, serve_error=error, device_bytes=float(total), library_bytes=taken)
