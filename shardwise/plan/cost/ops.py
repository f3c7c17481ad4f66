"""One operation of the network, and the list of them that a piece of it makes, each with its time on the job's chip.

The formulas that fill a tally are in `operations.py`; `passes.py` adds tallies up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.hardware import Operation, collective_seconds, gemm_seconds, grouped_gemm_seconds, memory_seconds
from shardwise.plan.cost.job import Job
from shardwise.run.coordinates import group_span

Number = Any  # a number, or an array with one entry a layout

FORWARD, INPUT, WEIGHT = range(3)
NOTHING = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Entry:
    """One operation. Tuples hold forward, backward-input and backward-weight."""

    name: str
    part: str
    category: str
    seconds: tuple[Number, Number, Number]
    flops: tuple[Number, Number, Number] = NOTHING
    bytes: tuple[Number, Number, Number] = NOTHING
    saved: Number = 0.0
    """Bytes kept for the backward pass."""
    kept: Number = 0.0
    """Of those, what is kept even when this operation is computed again: its inputs."""
    launches: tuple[float, float, float] = (1.0, 1.0, 0.0)
    core: bool = False
    """Belongs to the part of attention whose memory grows with the square of the sequence."""
    ends: bool = False
    """Stands after the last operation of its layer whose result the backward pass needs."""


@dataclass
class Tally:
    """The entries of one piece of the network, filled by the functions below."""

    job: Job
    entries: list[Entry] = field(default_factory=list)

    def product(
        self, name: str, part: str, rows: Number, columns: Number, inner: Number, *, saved: Number = None, wide: bool = False,
        ends: bool = False,
    ) -> None:  # fmt: skip
        """A matrix product with a weight of inner x columns; `wide` ones stay out of 8 bits."""
        chip, job = self.job.cluster.chip, self.job
        eight = job.fp8 and not wide
        dtype = "fp8" if eight else job.dtype
        flops = 2.0 * rows * columns * inner
        seconds = (
            gemm_seconds(chip, rows, columns, inner, dtype),
            gemm_seconds(chip, rows, inner, columns, dtype),
            gemm_seconds(chip, inner, columns, rows, dtype if job.fp8_gradients else job.dtype),
        )
        kept = rows * inner * (1.0 if eight and job.fp8_gradients else job.width) if saved is None else saved
        self.entries.append(
            Entry(name, part, "matmul", seconds, (flops,) * 3, saved=kept, launches=(1.0, 1.0, 1.0), ends=ends)
        )
        self._accumulate(name, part, columns * inner)
        self._cast(name, part, columns * inner)
        if (
            eight
        ):  # both inputs of each product are read, scaled, and written in 8 bits, once as they lie and once turned
            cast = rows * inner * (job.width + 2), rows * columns * (job.width + 2), 0.0
            self.stream(f"{name} to 8 bits", part, cast[0], cast[1])

    def _accumulate(self, name: str, part: str, numbers: Number) -> None:
        """Adding a weight's gradient to those of the microbatches before."""
        job = self.job
        if not job.stack.accumulate_bytes:
            return
        size = numbers * job.stack.accumulate_bytes * (1.0 - 1.0 / np.maximum(job.accumulation, 1.0))
        seconds = (0.0, 0.0, memory_seconds(job.cluster.chip, size))
        entry = Entry(f"{name} added", part, "memory", seconds, bytes=(0.0, 0.0, size), launches=(0.0, 0.0, 1.0))
        self.entries.append(entry)

    def _cast(self, name: str, part: str, numbers: Number) -> None:
        """A matrix from the dtype it is held in to that of the product, and its gradient back."""
        job = self.job
        if not job.stack.casts_weights or job.width >= job.stack.parameter_bytes:
            return
        if job.stack.keeps_compute_copies and part in ("attention", "ffn"):
            return
        # Sharded ones are cast before they are gathered, and then copied out of the message: about as much.
        size = numbers * (job.width + job.stack.parameter_bytes)
        seconds = memory_seconds(job.cluster.chip, size)
        self.entries.append(
            Entry(
                f"{name} cast",
                part,
                "memory",
                (seconds, 0.0, seconds),
                bytes=(size, 0.0, size),
                launches=(1.0, 0.0, 1.0),
            )
        )

    def grouped(self, name: str, rows: Number, columns: Number, inner: Number, experts: Number) -> None:
        """The same product for each of a rank's experts, rows dealt out evenly."""
        chip, job = self.job.cluster.chip, self.job
        eight = job.fp8 and job.stack.family != "shardwise"  # this trainer leaves experts in 16 bits
        dtype = "fp8" if eight else job.dtype
        flops = 2.0 * rows * columns * inner
        each = rows / experts
        seconds = (
            grouped_gemm_seconds(chip, rows, columns, inner, experts, dtype),
            grouped_gemm_seconds(chip, rows, inner, columns, experts, dtype),
            gemm_seconds(chip, inner, columns, each, dtype, count=experts),
        )
        kept = rows * inner * (1.0 if eight else job.width)
        self.entries.append(
            Entry(name, "experts", "matmul", seconds, (flops,) * 3, saved=kept, launches=(1.0, 1.0, 1.0))
        )
        self._accumulate(name, "experts", columns * inner * experts)
        self._cast(name, "experts", columns * inner * experts)
        if eight:
            self.stream(
                f"{name} to 8 bits", "experts", rows * inner * (job.width + 2), rows * columns * (job.width + 2)
            )

    def stream(
        self, name: str, part: str, forward: Number, backward: Number, *, saved: Number = 0.0, core: bool = False,
        launches: tuple[float, float] = (1.0, 1.0), ends: bool = False,
    ) -> None:  # fmt: skip
        """Work bound by memory: bytes read and written, forward and backward."""
        chip = self.job.cluster.chip
        many = 2.0 if self.job.stack.kernels == "eager" else 1.0
        dtype = self.job.dtype
        seconds = (
            memory_seconds(chip, forward, (name, "forward", dtype)),
            memory_seconds(chip, backward, (name, "backward", dtype)),
            0.0,
        )
        self.entries.append(
            Entry(name, part, "memory", seconds, bytes=(forward, backward, 0.0), saved=saved, core=core, ends=ends,
                  launches=(many * launches[0], many * launches[1], 0.0))
        )  # fmt: skip

    def exchange(
        self,
        part: str,
        axis: str,
        operation: Operation,
        size: Number,
        times: tuple[float, float, float],
        *,
        ends: bool = False,
    ) -> None:
        """A collective over an axis: how often it runs in each pass."""
        seconds = collective_seconds(self.job.cluster, operation, size, *span(self.job, axis))
        every = tuple(seconds * n for n in times)
        self.entries.append(
            Entry(
                f"{axis} {operation}",
                part,
                axis,
                every,
                launches=times,
                ends=ends,
            )
        )


def span(job: Job, axis: str) -> tuple[Number, Number]:
    """Size of an axis' groups and the distance between neighbours in one; `shard` with the context ranks that share parameters."""
    if axis == "expert" and regroups_tensor(job) and not job.layout.expert_tensor:
        return job.layout.expert, 1
    return group_span(job.layout, "zero" if axis == "shard" else axis)


def regroups_tensor(job: Job) -> bool:
    """Whether experts are spread over tensor ranks as well, as Megatron does without expert tensor parallelism."""
    return job.stack.family != "shardwise"
