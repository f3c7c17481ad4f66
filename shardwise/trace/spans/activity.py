"""Device activity of a rank: one row for each kernel, memcpy or memset, classified as compute, communication or copy and linked to
the runtime call that launched it. Most answers are computed from this table.

In a CPU-only profile the rows are self time of operators on the host's threads. A kernel is communication if it has the arguments
of a collective (NCCL and RCCL since PyTorch 2.3), or if its name is that of a communication library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import read_label
from shardwise.trace.kernel_names import CATEGORIES_BY_NAME, category_of
from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import DEVICE_KINDS, Events, Profile
from shardwise.trace.spans.intervals import Intervals, Nest, nest, self_time_segments, union

CLASSES = ("compute", "communication", "copy")
COMPUTE, COMMUNICATION, COPY = range(3)

# Communication libraries, then kernels of inference and MoE libraries.
_COMMUNICATING_KERNEL = re.compile(
    r"(?:^|[\s:_*])(?:nccl|rccl|oneccl|msccl|nvshmem)|deep_ep::|cross_device_reduce"
    r"|(?:one|two)_?shot_?all_?reduce|multimem_\w*(?:reduce|gather)|allreduce_fusion_kernel|all_?reduce_?kernel"
)
_COMMUNICATING_OPERATOR = re.compile(
    r"(?:gloo|nccl|mpi|ucc|xccl):|_?c10d(?:_functional)?(?:_autograd)?::|record_param_comms$|symm_mem::"
)
_COPYING_OPERATOR = frozenset(("aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_pin_memory"))
_LAUNCH = re.compile(r"^(?:cuda|hip|cu)(?:Ext)?(?:Module|Graph|Launch)*Launch(?:Cooperative)?(?:Kernel\w*)?$")
_BLOCKING = re.compile(r"Synchronize|cudaMemcpy|hipMemcpyWithStream")


@dataclass(frozen=True)
class Activity:
    """Rows sorted by start. Times are on the profile's clock."""

    profile: Profile
    on_host: bool
    """CPU-only profile: rows are segments of self time of operators on threads."""
    event: Integers
    start: Integers
    end: Integers
    kind: NDArray[np.int8]
    """`COMPUTE`, `COMMUNICATION` or `COPY`."""

    def __len__(self) -> int:
        return len(self.start)

    def intervals(self, *kinds: int) -> Intervals:
        """When rows of any of these classes ran; of all classes if none is given."""
        if not kinds:
            return union(self.start, self.end)
        wanted = np.isin(self.kind, kinds)
        return union(self.start[wanted], self.end[wanted])

    @cached_property
    def track(self) -> NDArray[np.int32]:
        """Track of each row, into the events' tracks."""
        return self.profile.events.track[self.event]

    @cached_property
    def name(self) -> NDArray[np.int32]:
        """Name of each row, into the events' names."""
        return self.profile.events.name[self.event]

    @cached_property
    def category(self) -> Integers:
        """The ledger's category of each row by its name, into `CATEGORIES_BY_NAME`."""
        names = self.profile.events.names
        used, which = np.unique(self.name, return_inverse=True)
        found = [CATEGORIES_BY_NAME.index(category_of(names[one])) for one in used.tolist()]
        return np.array(found or [0], np.int64)[which.reshape(-1)]

    @cached_property
    def launch(self) -> Integers:
        """The runtime call that launched each row, by correlation id. -1 where it was not recorded, and in a CPU-only profile."""
        events = self.profile.events
        calls = np.flatnonzero(events.of_kind("runtime") & (events.correlation >= 0))
        if self.on_host or not len(calls):
            return np.full(len(self), -1, np.int64)
        order = np.argsort(events.correlation[calls], kind="stable")
        numbers = events.correlation[calls][order]
        at = np.minimum(np.searchsorted(numbers, events.correlation[self.event]), len(calls) - 1)
        return np.where(numbers[at] == events.correlation[self.event], calls[order[at]], -1)

    @property
    def issued(self) -> tuple[NDArray[np.integer], Integers]:
        """Thread and time of the call that launched each row, -1 and 0 where it was not recorded; in a CPU-only profile the row's
        own."""
        if self.on_host:
            return self.track, self.start
        events, known = self.profile.events, self.launch >= 0
        return np.where(known, events.track[self.launch], -1), np.where(known, events.start[self.launch], 0)

    @cached_property
    def before(self) -> Integers:
        """The previous row on the same track, -1 for none."""
        return previous_on_track(self.track, self.start)

    def rows_of(self, event: Integers) -> Integers:
        """The first row of each event, -1 where it has none."""
        if not len(self):
            return np.full(len(event), -1, np.int64)
        order = np.argsort(self.event, kind="stable")
        at = np.minimum(np.searchsorted(self.event[order], event), len(self) - 1)
        return np.where(self.event[order][at] == event, order[at], -1)

    @cached_property
    def lost_launches(self) -> Integers:
        """Launch calls whose kernels are missing: CUDA graphs recorded without kernels, dropped events."""
        events = self.profile.events
        launching = events.named(lambda name: _LAUNCH.search(name) is not None, "runtime")
        calls = np.flatnonzero(launching & (events.correlation >= 0))
        return calls[~np.isin(calls, self.launch)]


def previous_on_track(track: NDArray[np.int32], start: Integers) -> Integers:
    """For each span, the previous one on its track; -1 for none."""
    order = np.lexsort((start, track))
    before = np.full(len(start), -1, np.int64)
    before[order[1:]] = np.where(track[order[1:]] == track[order[:-1]], order[:-1], -1)
    return before


def activity_of(profile: Profile) -> Activity:
    """Activity of the devices of a profile, or of its threads if it has no device."""
    events = profile.events
    event = np.flatnonzero(events.of_kind(*DEVICE_KINDS))
    if len(event):
        kind = np.where(events.of_kind("kernel")[event], COMPUTE, COPY).astype(np.int8)
        kind[_communicating_kernels(profile)[event]] = COMMUNICATION
        return Activity(profile, False, event, events.start[event], events.end[event], kind)
    host = ("cpu_op", "annotation")
    comms, copies = events.named(_communicating_operator, *host), events.named(_COPYING_OPERATOR.__contains__, *host)
    event = np.flatnonzero(host_work(events))
    span, start, end = self_time_segments(events.track[event], events.start[event], events.end[event])
    order = np.argsort(start, kind="stable")
    event = event[span[order]]
    kind = np.where(comms[event], COMMUNICATION, np.where(copies[event], COPY, COMPUTE)).astype(np.int8)
    return Activity(profile, True, event, start[order], end[order], kind)


def host_work(events: Events) -> NDArray[np.bool_]:
    """Mask of the events that are work of the host: operators, and annotations of collectives."""
    # Labels of actions, phases and modules are recorded as operators, but their self time is not work.
    label = np.zeros(max(len(events.names), 1), np.bool_)
    label[[name for name, one in events.labels.items() if one.kind != "message"]] = True
    return (events.of_kind("cpu_op") & ~label[events.name]) | events.named(_communicating_operator, "annotation")


def blocking_calls(events: Events) -> Integers:
    """Runtime calls that block the host until its device is done."""
    return np.flatnonzero(events.named(lambda name: bool(_BLOCKING.search(name)) and "Async" not in name, "runtime"))


@lru_cache(maxsize=1 << 16)
def _communicating_kernel(name: str) -> bool:
    return _COMMUNICATING_KERNEL.search(name.lower()) is not None


def _communicating_kernels(profile: Profile) -> NDArray[np.bool_]:
    events = profile.events
    result = events.named(_communicating_kernel, "kernel")
    result[profile.comm_params.event] = True
    return result & events.of_kind("kernel")


@lru_cache(maxsize=1 << 16)
def _communicating_operator(name: str) -> bool:
    """Whether an operator or annotation on the host is a collective."""
    found = read_label(name)
    return found.kind == "message" if found else _COMMUNICATING_OPERATOR.match(name) is not None


@dataclass(frozen=True)
class Spans:
    """Some spans of the host's threads, to find the innermost one open at a time."""

    event: Integers
    """Into the events."""
    nest: Nest

    def innermost(self, track: NDArray[np.integer], time: Integers) -> Integers:
        """The innermost of these events open on each track at each time, -1 for none."""
        found = self.nest.innermost(track, time)
        return np.where(found >= 0, self.event[found] if len(self.event) else -1, -1)


def spans_of(events: Events, mask: NDArray[np.bool_]) -> Spans:
    """The masked spans that are on threads."""
    event = np.flatnonzero(mask & (events.stream < 0))
    return Spans(event, nest(events.track[event], events.start[event], events.end[event]))


def label_spans(events: Events, kind: str) -> Spans:
    """The trainer's labels of one kind."""
    mask = np.zeros(max(len(events.names), 1), np.bool_)
    mask[[name for name, label in events.labels.items() if label.kind == kind]] = True
    return spans_of(events, mask[events.name] & events.of_kind("cpu_op", "annotation"))
