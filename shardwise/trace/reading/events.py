"""What one rank's profile holds, as columns: every span with its exact time in nanoseconds, and beside them, sparsely, what only
some spans carry: arguments of messages, shapes, allocations. A million spans are a few dozen megabytes this way, and every
question asked of them is arithmetic on arrays.

Arrows between spans (`ac2g`, `fwdbwd`) are not kept: `correlation` and `sequence` say the same, and are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Indices = NDArray[np.int32]

KINDS = (
    "cpu_op", "annotation", "runtime", "kernel", "copy", "set", "gpu_annotation", "sync", "python", "other",
)  # fmt: skip
"""What a span is: an operator on the CPU, a user's range, a call of the driver or runtime, then on the device a kernel, a memory
copy, a memory set, a range over the kernels launched in it, waiting for a stream or event; a Python frame; anything else."""

CODE: Mapping[str, int] = {kind: code for code, kind in enumerate(KINDS)}
"""Kind to its code in the column."""

DEVICE_KINDS = ("kernel", "copy", "set")
"""What keeps a device busy."""

KIND_OF_CATEGORY: Mapping[str, str] = {
    # PyTorch since 1.12, then the spellings of 1.8 to 1.11.
    "cpu_op": "cpu_op", "Operator": "cpu_op", "operator": "cpu_op", "cpu_operator": "cpu_op",
    "user_annotation": "annotation", "cpu_user_annotation": "annotation",
    "gpu_user_annotation": "gpu_annotation",
    "cuda_runtime": "runtime", "cuda_driver": "runtime", "Runtime": "runtime", "runtime": "runtime",
    "hip_runtime": "runtime", "hip_driver": "runtime", "xpu_runtime": "runtime", "xpu_driver": "runtime",
    "mtia_runtime": "runtime", "privateuse1_runtime": "runtime", "privateuse1_driver": "runtime",
    "kernel": "kernel", "Kernel": "kernel", "concurrent_kernel": "kernel", "gpu_op": "kernel",
    "gpu_memcpy": "copy", "Memcpy": "copy", "memcpy": "copy", "hip_memcpy": "copy",
    "gpu_memset": "set", "Memset": "set", "memset": "set", "hip_memset": "set",
    "cuda_sync": "sync", "hip_sync": "sync", "xpu_sync": "sync",
    "python_function": "python", "Python": "python",
}  # fmt: skip
"""Category of a span in the file to its kind; categories not named here are `other`."""

NONE = -1
"""Stands in every column of numbers for "the file does not say"."""


class Lane(NamedTuple):
    """What spans run on: a thread of a process, or a stream of a device."""

    process: str
    """Process id, or what the file has in its place."""
    thread: str
    name: str
    """The thread's name, "" when the file gives none."""
    stream: int
    """Stream of a device, or -1 for a thread."""
    device: int
    """Number of the device, or -1 for a thread."""


class Group(NamedTuple):
    """A process group."""

    description: str
    """What the program called it: Shardwise and DeviceMesh put the axis here."""
    ranks: tuple[int, ...]
    """Its members, () when not listed."""
    size: int


class Device(NamedTuple):
    """A device of the recording machine."""

    number: int
    name: str
    multiprocessors: int
    memory: int
    """In bytes."""


@dataclass(frozen=True)
class Events:
    """The spans of one rank, sorted by start; of equal starts the longer first, so that what encloses comes first."""

    kind: NDArray[np.int8]
    """Code of a kind, see `CODE`."""
    name: Indices
    """Into `names`."""
    start: Integers
    """Nanoseconds after the profile's `base`."""
    duration: Integers
    """Nanoseconds, never negative."""
    lane: Indices
    """Into `lanes`."""
    correlation: Integers
    """Equal for a launch and what it launched."""
    external: Integers
    """Operator that a launch or kernel belongs to, by the profiler's number."""
    sequence: Integers
    """Autograd's number, equal for a forward operator and its backward."""
    forward_thread: Integers
    """On backward operators, the profiler's number of the thread that ran forward."""
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def end(self) -> Integers:
        """Nanoseconds after the profile's `base`."""
        return self.start + self.duration

    @cached_property
    def stream(self) -> Integers:
        """Stream of each span's lane, -1 on threads."""
        return np.array([lane.stream for lane in self.lanes] or [NONE], np.int64)[self.lane]

    def of_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Which spans are of these kinds."""
        wanted = np.zeros(len(KINDS), np.bool_)
        wanted[[CODE[kind] for kind in kinds]] = True
        return wanted[self.kind]

    def named(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which spans have a name for which `wanted` (one answer a name) says yes."""
        return wanted[self.name] if len(wanted) else np.zeros(len(self), np.bool_)


@dataclass(frozen=True)
class Messages:
    """Spans that carry arguments of a collective or a message: `record_param_comms` on the CPU, NCCL's and RCCL's kernels."""

    event: Indices
    """Into the events, ascending."""
    group: Indices
    """Name of the process group, into `texts`; likewise the next five. -1: not said."""
    description: Indices
    collective: Indices
    dtype: Indices
    ranks: Indices
    """Members of the group as the file writes them: "[0, 1]", with "..." where it shortens."""
    splits_in: Indices
    splits_out: Indices
    elements_in: Integers
    elements_out: Integers
    size: Integers
    """Ranks in the group."""
    sequence: Integers
    """Number of the collective within its group."""
    source: Integers
    """Rank that sends, on messages between two."""
    destination: Integers
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.event)

    def text(self, column: Indices, row: int) -> str:
        """What a column of texts says in a row, "" for nothing."""
        return self.texts[column[row]] if column[row] >= 0 else ""


@dataclass(frozen=True)
class Shapes:
    """Inputs of operators. Most operators repeat the same few, so each distinct one is kept once, as the file's own JSON."""

    event: Indices
    """Into the events, ascending."""
    dims: Indices
    """Into `texts`, -1: not said; likewise the next two."""
    types: Indices
    values: Indices
    """Concrete inputs: scalars as text."""
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.event)

    def decode(self, text: int) -> list[Any]:
        """The list that a column refers to; [] for -1 or for what is no list."""
        if text < 0:
            return []
        try:
            value = msgspec.json.decode(self.texts[text])
        except (msgspec.DecodeError, RecursionError):
            return []
        return value if isinstance(value, list) else []


@dataclass(frozen=True)
class Allocations:
    """Memory given out and taken back, in the order of time."""

    time: Integers
    """Nanoseconds after the profile's `base`."""
    bytes: Integers
    """Negative when given back."""
    allocated: Integers
    """Bytes in use on the device afterwards; -1: not said."""
    reserved: Integers
    """Bytes the allocator holds afterwards; -1: not said."""
    device_type: Integers
    """PyTorch's number of the kind of device: 0 CPU, 1 CUDA (also AMD's)."""
    device: Integers
    address: Integers
    """Where the block is; equal for giving out and taking back."""

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True)
class Profile:
    """What one file says about one rank."""

    rank: int
    world: int
    """Ranks in the job, or -1 when the file does not say."""
    base: int
    """What `start` counts from, in nanoseconds of the recording machine's clock."""
    path: str
    events: Events
    messages: Messages
    shapes: Shapes
    allocations: Allocations
    groups: Mapping[str, Group] = field(default_factory=dict)
    """Process groups by the name that messages use."""
    devices: tuple[Device, ...] = ()
    backend: str = ""
    """What carries messages: nccl, gloo, …"""
    rank_known: bool = True
    """Whether the file or its name says the rank; otherwise it is a free number."""
    problems: tuple[str, ...] = ()
    """What could not be read or made sense of, one sentence each, naming file and byte."""
