"""One operation of the network with its time on the job's chip, and the list of those that a module runs.

`operations.py` holds the formulas that fill the lists; `passes.py` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardwise.hardware import (
    Collective,
    alignment,
    collective_seconds,
    gemm_constants,
    gemm_seconds,
    grouped_gemm_seconds,
    grouped_gradient_seconds,
    memory_seconds,
)
from shardwise.plan.cost.job import Job, Number
from shardwise.run.ranks.coordinates import group_span

ByPass = tuple[Number, Number, Number]
"""Forward, backward for the input, backward for the weights."""
FORWARD, INPUT, WEIGHT = range(3)
NOTHING = (0.0, 0.0, 0.0)
FUSED = {"qkv": ("q", "k", "v"), "up": ("gate", "up"), "expert up": ("gate", "up"), "q_up": ("q",), "kv_up": ("kv",)}
"""The matrices that a GEMM fuses, since they have the same input, by the name of the GEMM."""

RECIPES = {
    # how values are scaled to 8 bits: speed of a GEMM relative to one scale a tensor; extra reads of its inputs
    "": (1.0, 0.0),
    "delayed": (1.0, 0.0),  # by the amax of earlier steps
    "tensorwise": (1.0, 0.0),  # by the current amax, which is computed first
    "rowwise": (0.8, 1.0),  # by the current amax of every row; the scales are applied as the output is written
    "blockwise": (0.8, 0.0),  # by blocks of 128; Hopper accumulates the blocks outside of its tensor cores
    "mxfp8": (1.0, 0.0),  # by groups of 32 values, in the tensor cores
    "nvfp4": (1.0, 0.0),
}
OWN_RECIPES = {"rowwise": (0.92, 0.0), "tensorwise": (1.0, 1.0)}
"""The same of this trainer, where it differs. By rows: a row is read once, and its scale is a power of two; the speed is the one
that fits runs on an H200 best (`benchmarks/gpu/RESULTS.md`: two on one GPU, ranks of 14B and 32B; GEMMs by themselves lose 1 to 3%,
`cool_kernels.py`). By tensors: a profile of 8 layers of 2304 on an H200 has 0.95 ms a layer of amax and casts, where reading once
and writing twice takes 0.64."""


@dataclass(frozen=True)
class Op:
    """One operation."""

    name: str
    part: str
    category: str
    seconds: ByPass
    flops: ByPass = NOTHING
    bytes: ByPass = NOTHING
    saved: Number = 0.0
    """Bytes saved for the backward pass."""
    saved_inputs: Number = 0.0
    """Of those, its inputs: they are saved even when the op is recomputed."""
    launches: ByPass = (1.0, 1.0, 0.0)
    core: bool = False
    """Whether it belongs to the part of attention whose memory grows with the square of the sequence."""
    early_stop: bool = False
    """Whether it comes after the last tensor of its layer that the backward pass needs, so recomputation may stop before it."""
    hot: bool = False
    """Whether it is a GEMM of experts or in 8 bits, which draws more power than others."""


class OpList(list[Op]):
    """The ops of one module on one rank, for one microbatch."""

    def __init__(self, job: Job, ops: Iterable[Op] = ()) -> None:
        super().__init__(ops)
        self.job = job

    @property
    def kernels_each(self) -> float:
        """Kernels of an op that is not a GEMM, unless it states its own number."""
        return 2.0 if self.job.framework.kernels == "eager" else 1.0

    def gemm(
        self, name: str, part: str, rows: Number, columns: Number, inner: Number, *, saved: Number = None,
        high_precision: bool = False, early_stop: bool = False, parts: tuple[Number, ...] = (),
    ) -> None:  # fmt: skip
        """A GEMM with a weight of inner x columns; a `high_precision` one never runs in fp8. `parts` are the columns of each of
        its matrices, where these differ."""
        job, shape = self.job, (rows, columns, inner)
        fp8 = job.fp8 and not high_precision
        dtype = "fp8" if fp8 else job.dtype
        # Vocabularies are padded, and a CPU has no tiles.
        kept = 1.0 if high_precision or job.cluster.chip.name == "cpu" else alignment(columns, inner)
        kept = kept * self._scaled(fp8)
        one, two, three = self._products(shape, dtype, dtype if job.fp8_gradients else job.dtype)
        if saved is None:
            saved = rows * inner * (1.0 if fp8 and job.fp8_gradients else job.width)
        saved = self._low_rank(name, part, shape, saved, parts=parts)
        self._gemm(name, part, (one / kept, two / kept, three / kept), shape, 1, saved, fp8=fp8, early_stop=early_stop)

    def grouped_gemm(
        self, name: str, rows: Number, columns: Number, inner: Number, experts: Number, uneven: Number = 1.0
    ) -> None:
        """The same GEMM for each of a rank's experts, with the rows spread evenly over them; `uneven` is the factor by which uneven
        rows make the forward and the input-gradient GEMMs longer."""
        job, shape = self.job, (rows, columns, inner)
        fp8 = job.fp8 and job.framework.family != "shardwise"  # this trainer leaves experts in 16 bits
        dtype, kept = "fp8" if fp8 else job.dtype, self._scaled(fp8)
        forward, to_input, to_weight = self._products(shape, dtype, dtype, experts)
        seconds = uneven * forward / kept, uneven * to_input / kept, to_weight / kept
        saved = self._low_rank(name, "experts", shape, rows * inner * (1.0 if fp8 else job.width), experts)
        self._gemm(name, "experts", seconds, shape, experts, saved, fp8=fp8)

    def _products(self, shape: ByPass, dtype: str, of_weight: str, experts: Number = None) -> ByPass:
        """Seconds of a GEMM of these rows, columns and inner dimension, and of those for the gradients of its input and its weight,
        the last `of_weight` in its own dtype; with `experts`, of one for each."""
        chip, (m, n, k) = self.job.cluster.chip, shape
        if experts is None:
            forward, to_input = gemm_seconds(chip, m, n, k, dtype), gemm_seconds(chip, m, k, n, dtype)
            to_weight = gemm_seconds(chip, k, n, m, of_weight)
        else:
            forward, to_input = (grouped_gemm_seconds(chip, m, *each, experts, dtype) for each in ((n, k), (k, n)))
            to_weight = grouped_gradient_seconds(chip, m, n, k, experts, of_weight)
        return forward, to_input / self._exact(dtype), to_weight / self._exact(of_weight)

    def _exact(self, dtype: str) -> float:
        """Relative speed of a GEMM for gradients, which in 8 bits does not accumulate fast."""
        return gemm_constants(self.job.cluster.chip, dtype).exact if dtype == "fp8" else 1.0

    def _scaled(self, fp8: bool) -> float:
        """Relative speed of a GEMM, given how its inputs are scaled."""
        return self._recipe[0] if fp8 else 1.0

    @property
    def _recipe(self) -> tuple[float, float]:
        """Relative speed, and extra reads, of how this program scales values to 8 bits."""
        own = OWN_RECIPES if self.job.framework.family == "shardwise" else {}
        return own.get(self.job.framework.fp8_recipe) or RECIPES[self.job.framework.fp8_recipe]

    def _low_rank(
        self, name: str, part: str, shape: ByPass, saved: Number, experts: Number = None, parts: tuple[Number, ...] = ()
    ) -> Number:
        """Adds the GEMMs of the adapters of a GEMM, which may fuse several matrices with one input. Returns the saved bytes of that
        input: a frozen matrix does not need it, but its adapter does."""
        job, adapter = self.job, self.job.adapter
        if not adapter.used:
            return saved
        matrices = FUSED.get(name, (name.removeprefix("expert "),))
        if name == "up" and not job.model.gated:
            matrices = ("up",)
        each = parts or (shape[1] / len(matrices),) * len(matrices)
        adapted = [n for matrix, n in zip(matrices, each, strict=True) if adapter.adapts(matrix)]
        many = len(adapted) if part in ("attention", "ffn", "experts") else 0
        if not many:
            return 0.0 * saved
        (rows, _, inner), low = shape, many * float(adapter.rank)
        launches = (float(many),) * 3
        for n, k, kept in ((low, inner, 0.0), (sum(adapted), float(adapter.rank), rows * low * job.width)):
            seconds = self._products((rows, n, k), job.dtype, job.dtype, experts)
            flops = 2.0 * rows * n * k
            self.append(Op(f"{name} adapter", part, "matmul", seconds, (flops,) * 3, NOTHING, kept, 0.0, launches))
        # A's output is scaled, B's is added, and likewise backward; A and B are cast, and their gradients cast back.
        casts = 2.0 if job.framework.casts_weights and job.width < job.framework.parameter_bytes else 0.0
        beside = many * (2.0 + casts)
        self.append(Op(f"{name} adapter added", part, "memory", NOTHING, launches=(beside, beside, 0.0)))
        if adapter.kind == "dora":  # the sum, which is saved, times a factor for each output
            size = rows * sum(adapted) * job.width
            self.elementwise(f"{name} rescaled", part, 2 * size, 4 * size, saved=size)
        return saved

    def _gemm(
        self, name: str, part: str, seconds: ByPass, shape: ByPass, count: Number, saved: Number, *, fp8: bool,
        early_stop: bool = False,
    ) -> None:  # fmt: skip
        """Adds a GEMM and the ops around it: accumulating its gradient, casting its weight, scaling its inputs to fp8."""
        job, framework, (rows, columns, inner) = self.job, self.job.framework, shape
        flops, numel = 2.0 * rows * columns * inner, columns * inner * count
        launch = 1.0 + framework.expert_host * count * (part == "experts")
        once: ByPass = (launch, launch, launch)
        hot = fp8 or part == "experts"
        every: ByPass = (flops,) * 3
        if job.adapter.used:  # a frozen weight has no gradient, and needs no cast
            every, once, seconds = (flops, flops, 0.0), (launch, launch, 0.0), (seconds[0], seconds[1], 0.0)
            in_4_bits = job.adapter.kind == "qlora" and part in ("attention", "ffn", "experts")
            early_stop = early_stop and job.adapter.kind != "qlora"
            # Each 4-bit matrix is dequantized and multiplied by itself.
            apart = float(len(FUSED.get(name, (name,)))) if in_4_bits and (name != "up" or job.model.gated) else 1.0
            once = (apart * launch, apart * launch, 0.0)
            self.append(
                Op(name, part, "matmul", seconds, every, NOTHING, saved, 0.0, once, early_stop=early_stop, hot=hot)
            )
            if in_4_bits:
                # In each pass one kernel reads it in 4 bits and writes it dequantized.
                size, often = numel * (0.52 + job.width), apart / self.kernels_each
                self.elementwise(f"{name} of 4 bits", part, size, size, early_stop=early_stop, launches=(often, often))
            return
        self.append(Op(name, part, "matmul", seconds, every, NOTHING, saved, 0.0, once, early_stop=early_stop, hot=hot))
        alone = 1.0 - job.fully_sharded[part == "experts"]
        if framework.accumulate_bytes:
            self._weight_pass(f"{name} added", part, numel * alone * self._added_bytes(), forward=False)
        biased = job.model.bias == "all" or (job.model.bias == "qkv" and name == "qkv")
        if biased and framework.family == "shardwise" and part in ("attention", "ffn"):  # others sum it up in the GEMM
            self._weight_pass(f"{name} bias", part, rows * columns * job.width, forward=False)
        kept = framework.keeps_compute_copies and part in ("attention", "ffn")
        if framework.casts_weights and job.width < framework.parameter_bytes and not kept:
            size = numel * (job.width + framework.parameter_bytes) * alone
            self._weight_pass(f"{name} cast", part, size, forward=True)
        if fp8:  # both inputs of each GEMM are read, scaled, and written in fp8, once as they are and once transposed
            each = job.width * (1.0 + self._recipe[1]) + 2
            sizes = rows * inner * each, rows * columns * each
            self.elementwise(f"{name} to 8 bits", part, *sizes)
            if framework.family == "shardwise":  # a weight that was gathered in fp8 is transposed for its backward pass
                self.elementwise(
                    f"{name} transposed", part, 0.0, 2.0 * numel * (1.0 - alone), launches=(0.0, 1.0 - alone)
                )

    def _added_bytes(self) -> Number:
        """Bytes moved in each microbatch to add up a weight's gradient, for each element. DistributedDataParallel divides what is
        in its buckets once a step, and to buckets of zeros the first microbatch's gradient is added too (`zero_grad`)."""
        framework, microbatches = self.job.framework, np.maximum(self.job.accumulation, 1.0)
        added = framework.accumulate_bytes * (1.0 - 1.0 / microbatches)
        if framework.family != "shardwise":
            return added
        bucket, several = framework.parameter_bytes, microbatches > 1
        in_buckets = framework.accumulate_bytes * several + bucket * (2.0 + several) / microbatches
        ddp = (1.0 - np.asarray(self.job.fully_sharded[0])) * (np.asarray(self.job.layout.sharding_replicas) > 1)
        return np.where(ddp > 0, in_buckets, added)

    def _weight_pass(self, name: str, part: str, size: Number, *, forward: bool) -> None:
        """Bytes moved for a weight's gradient, and where `forward` for the weight too."""
        seconds, often = memory_seconds(self.job.cluster.chip, size), float(forward)
        first = (seconds, size) if forward else (0.0, 0.0)
        self.append(
            Op(name, part, "memory", (first[0], 0.0, seconds), bytes=(first[1], 0.0, size), launches=(often, 0.0, 1.0))
        )

    def elementwise(
        self, name: str, part: str, forward: Number, backward: Number, *, saved: Number = 0.0, core: bool = False,
        launches: tuple[float, float] = (1.0, 1.0), early_stop: bool = False, longer: tuple[float, float] = (1.0, 1.0),
    ) -> None:  # fmt: skip
        """Memory-bound work: bytes read and written, forward and backward; `longer` is how many times as long as passes over
        contiguous memory it takes."""
        chip, dtype = self.job.cluster.chip, self.job.dtype
        many = self.kernels_each
        seconds = (
            memory_seconds(chip, forward, (name, "forward", dtype)) * longer[0],
            memory_seconds(chip, backward, (name, "backward", dtype)) * longer[1],
            0.0,
        )
        self.append(
            Op(name, part, "memory", seconds, bytes=(forward, backward, 0.0), saved=saved, core=core,
               early_stop=early_stop, launches=(many * launches[0], many * launches[1], 0.0))
        )  # fmt: skip

    def collective(
        self, part: str, axis: str, kind: Collective, size: Number, times: ByPass, *, early_stop: bool = False
    ) -> None:
        """A collective over an axis, run this many times in each pass."""
        seconds = collective_seconds(self.job.cluster, kind, size, *span(self.job, axis))
        forward, to_input, to_weight = times
        every = (seconds * forward, seconds * to_input, seconds * to_weight)
        host = self.job.framework.collective_host
        launches = (host * forward, host * to_input, host * to_weight)
        self.append(Op(f"{axis} {kind}", part, axis, every, launches=launches, early_stop=early_stop))


def span(job: Job, axis: str) -> tuple[Number, Number]:
    """Size of an axis' groups and the distance between neighbours in one; `shard` includes the context ranks."""
    if axis == "expert" and regroups_tensor(job) and not job.layout.expert_tensor:
        return job.layout.expert, 1
    return group_span(job.layout, "zero" if axis == "shard" else axis)


def regroups_tensor(job: Job) -> bool:
    """Whether experts are spread over tensor ranks as well, as Megatron does without expert tensor parallelism."""
    return job.framework.family != "shardwise"
