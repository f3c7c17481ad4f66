"""One rank's profile as columns: every span with its exact time in nanoseconds, and sparse tables for what only some spans have:
arguments of collectives and input shapes. Allocations are a table of their own. A million spans take a few dozen megabytes, and
every question about them is arithmetic on arrays.

Flow events (`ac2g`, `fwdbwd`) are dropped: `correlation` and `sequence` hold the same links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwise.labels import PREFIX, Label, read_label
from shardwise.trace.reading.integers import NONE, Integers

Indices = NDArray[np.int32]

KINDS = (
    "cpu_op", "annotation", "runtime", "kernel", "copy", "set", "gpu_annotation", "sync", "python", "other",
)  # fmt: skip
"""Kinds of spans. On the host: operator, user annotation, runtime or driver call. On the device: kernel, memcpy, memset, the
annotation over kernels launched in a user's range, synchronisation with a stream or event. Then Python frame, and any other."""

CODE: Mapping[str, int] = {kind: code for code, kind in enumerate(KINDS)}
"""Integer code of each kind in `Events.kind`."""

DEVICE_KINDS = ("kernel", "copy", "set")
"""Kinds that keep a device busy."""

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
"""Kind of each category in the file. A category that is not here is `other`."""


class Track(NamedTuple):
    """A thread of a process, or a stream of a device."""

    process: str
    """`pid` of the file, which need not be a number."""
    thread: str
    stream: int
    """Stream of a device, -1 for a thread."""
    device: int
    """Device index, -1 for a thread."""


class Group(NamedTuple):
    """A process group."""

    description: str
    """`pg_desc` of the file. Shardwise and DeviceMesh put the axis here."""
    ranks: tuple[int, ...]
    """Its members, () when not listed."""
    size: int


class Device(NamedTuple):
    """A device of the recording machine."""

    number: int
    name: str


@dataclass(frozen=True)
class Events:
    """The spans of one rank, sorted by start, the longer first at equal starts: a parent comes before its children."""

    kind: NDArray[np.int8]
    """See `CODE`."""
    name: Indices
    """Into `names`."""
    start: Integers
    """Nanoseconds after the profile's `base`."""
    duration: Integers
    """Nanoseconds, never negative."""
    track: Indices
    """Into `tracks`."""
    correlation: Integers
    """Correlation id, equal for a runtime call and the kernel, memcpy or memset it launched."""
    sequence: Integers
    """Autograd's sequence number, equal for a forward operator and its backward."""
    forward_thread: Integers
    """On backward operators: id of the thread that ran the forward."""
    names: tuple[str, ...]
    tracks: tuple[Track, ...]

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def end(self) -> Integers:
        """Nanoseconds after the profile's `base`."""
        return self.start + self.duration

    @cached_property
    def stream(self) -> Integers:
        """Stream of each span's track, -1 on threads."""
        return np.array([track.stream for track in self.tracks] or [NONE], np.int64)[self.track]

    def of_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Mask of the spans of these kinds."""
        wanted = np.zeros(len(KINDS), np.bool_)
        wanted[[CODE[kind] for kind in kinds]] = True
        return wanted[self.kind]

    def by_name(self, value: Callable[[str], int], *kinds: str, otherwise: int = 0) -> Integers:
        """`value` of each distinct name, to be indexed by `name`; `otherwise` for names that no span of these kinds has, if any are
        given. Never empty, so that index -1 is safe."""
        found = np.full(max(len(self.names), 1), otherwise, np.int64)
        names = self.names
        at = self.names_of(*(kinds or KINDS))
        found[at] = [value(names[one]) for one in at.tolist()]
        return found

    def named(self, wanted: Callable[[str], bool], *kinds: str) -> NDArray[np.bool_]:
        """Mask of the spans whose name satisfies `wanted`, of these kinds if any are given. Each distinct name that they have is
        tested once."""
        found = (self.by_name(wanted, *kinds) > 0)[self.name]
        return found & self.of_kind(*kinds) if kinds else found

    @cached_property
    def labels(self) -> dict[int, Label]:
        """The trainer's labels among the names on the host, by index into `names`."""
        names = self.names
        return {
            one: label
            for one in self.names_of("cpu_op", "annotation").tolist()
            if names[one].startswith(PREFIX) and (label := read_label(names[one])) is not None
        }

    def names_of(self, *kinds: str) -> Integers:
        """The distinct names that spans of these kinds have, as indices into `names`."""
        return np.flatnonzero(self._has_kind[[CODE[kind] for kind in kinds]].any(axis=0))

    @cached_property
    def _has_kind(self) -> NDArray[np.bool_]:
        """By kind and name: whether there is such a span."""
        found = np.zeros((len(KINDS), max(len(self.names), 1)), np.bool_)
        found[self.kind, self.name] = True
        return found


@dataclass(frozen=True)
class CommParams:
    """Arguments of collectives and P2P messages: from `record_param_comms` on the host, and from kernels of NCCL or RCCL."""

    event: Indices
    """Into the events, sorted."""
    group: Indices
    """Name of the process group. This and the next five columns index `texts`; -1: not given."""
    description: Indices
    collective: Indices
    dtype: Indices
    ranks: Indices
    """Members of the group as the file writes them: "[0, 1]", with "..." where truncated."""
    splits_in: Indices
    elements_in: Integers
    elements_out: Integers
    size: Integers
    """Ranks in the group."""
    sequence: Integers
    """Sequence number of the collective in its group."""
    source: Integers
    """Sending rank of a P2P message."""
    destination: Integers
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.event)


@dataclass(frozen=True)
class Shapes:
    """Inputs of operators. Few are distinct, so each is interned, as the file's JSON text."""

    event: Indices
    """Into the events, sorted."""
    dims: Indices
    """This and the next two columns index `texts`; -1: not given."""
    types: Indices
    values: Indices
    """Concrete inputs: scalars as strings."""
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.event)

    def decode(self, text: int) -> list[Any]:
        """The list at an index of `texts`; [] for -1 and for any text that is not a JSON list."""
        if text < 0:
            return []
        try:
            value = msgspec.json.decode(self.texts[text])
        except (msgspec.DecodeError, RecursionError):
            return []
        return value if isinstance(value, list) else []


@dataclass(frozen=True)
class Allocations:
    """Memory allocated and freed, by time."""

    time: Integers
    """Nanoseconds after the profile's `base`."""
    bytes: Integers
    """Negative when freed."""
    allocated: Integers
    """Bytes allocated on the device afterwards; -1: not given."""
    reserved: Integers
    """Bytes reserved by the allocator afterwards; -1: not given."""
    device_type: Integers
    """`c10::DeviceType`: 0 CPU, 1 CUDA and ROCm."""
    device: Integers

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True)
class Profile:
    """The parsed profile of one rank, from one file."""

    rank: int
    world: int
    """Ranks of the job, -1 when not given."""
    base: int
    """Time zero of `start`, in nanoseconds of the recording host's clock."""
    path: str
    events: Events
    comm_params: CommParams
    shapes: Shapes
    allocations: Allocations
    groups: Mapping[str, Group] = field(default_factory=dict)
    """Process groups by name."""
    devices: tuple[Device, ...] = ()
    rank_known: bool = True
    """Whether the file or its name gives the rank; otherwise it is the first unused number."""
    problems: tuple[str, ...] = ()
    """What could not be parsed, one sentence each, with file and byte."""

    @property
    def used_devices(self) -> tuple[Device, ...]:
        """The devices that ran kernels, copies or sets; those that the file does not list have no name."""
        tracks = np.unique(self.events.track[self.events.of_kind(*DEVICE_KINDS)]).tolist()
        listed = {device.number: device for device in self.devices}
        numbers = sorted({self.events.tracks[track].device for track in tracks})
        return tuple(listed.get(number, Device(number, "")) for number in numbers)


def row_of(sorted_events: NDArray[np.integer], event: Integers) -> Integers:
    """Row of each event in a sorted column of events, -1 if absent."""
    if not len(sorted_events):
        return np.full(len(event), NONE, np.int64)
    at = np.minimum(np.searchsorted(sorted_events, event), len(sorted_events) - 1)
    return np.where(sorted_events[at] == event, at, NONE)


def column_at(column: NDArray[np.integer], row: Integers) -> Integers:
    """Values of a column at these rows, -1 where the row is -1."""
    return np.where(row >= 0, column[row].astype(np.int64), NONE) if len(column) else np.full(len(row), NONE, np.int64)
