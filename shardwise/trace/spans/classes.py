"""Sorts what took time into three classes: computing, communicating, copying memory. On a device, kernels, copies and sets; on a
profile without one, the operators' own time on the host's threads.

A kernel communicates when its arguments say so (NCCL and RCCL write them since PyTorch 2.3); only where it has none, by its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import read_label
from shardwise.trace.reading.events import DEVICE_KINDS, Events, Integers, Profile
from shardwise.trace.spans.intervals import Intervals, own_pieces, union

CLASSES = ("compute", "communication", "copy")
COMPUTE, COMMUNICATION, COPY = range(3)

# Libraries, then kernels that libraries for inference and for experts bring themselves.
_COMMUNICATING_KERNEL = re.compile(
    r"(?:^|[\s:_*])(?:nccl|rccl|oneccl|msccl|nvshmem)|deep_ep::|cross_device_reduce"
    r"|(?:one|two)_?shot_?all_?reduce|multimem_\w*(?:reduce|gather)|allreduce_fusion_kernel|all_?reduce_?kernel",
    re.IGNORECASE,
)
_COMMUNICATING_OPERATOR = re.compile(
    r"(?:gloo|nccl|mpi|ucc|xccl):|_?c10d(?:_functional)?(?:_autograd)?::|record_param_comms$|symm_mem::"
)
_COPYING_OPERATOR = frozenset(("aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_pin_memory"))


@dataclass(frozen=True)
class Classified:
    """Pieces of busy time with the event each belongs to; on a device, whole events."""

    on_device: bool
    event: Integers
    """Into the events."""
    start: Integers
    end: Integers
    kind: NDArray[np.int8]
    """`COMPUTE`, `COMMUNICATION` or `COPY`."""

    def intervals(self, *kinds: int) -> Intervals:
        """When any of these classes was under way; of all, when none is named."""
        wanted = np.isin(self.kind, kinds) if kinds else np.ones(len(self.kind), np.bool_)
        return union(self.start[wanted], self.end[wanted])


def classify(profile: Profile) -> Classified:
    """The busy time of a profile: of its devices, or of its threads when it has none."""
    events = profile.events
    on_device = events.of_kind(*DEVICE_KINDS)
    if on_device.any():
        event = np.flatnonzero(on_device)
        kind = np.where(events.of_kind("kernel")[event], COMPUTE, COPY).astype(np.int8)
        kind[communicating_kernels(profile)[event]] = COMMUNICATION
        return Classified(True, event, events.start[event], events.end[event], kind)
    message = events.named(np.array([communicating_operator(name) for name in events.names], np.bool_))
    copies = events.named(np.array([name in _COPYING_OPERATOR for name in events.names], np.bool_))
    event = np.flatnonzero(host_work(events))
    piece, start, end = own_pieces(events.lane[event], events.start[event], events.end[event])
    event = event[piece]
    kind = np.where(message[event], COMMUNICATION, np.where(copies[event], COPY, COMPUTE)).astype(np.int8)
    return Classified(False, event, start, end, kind)


def host_work(events: Events) -> NDArray[np.bool_]:
    """Which events are work of the host: its operators, and the ranges that stand for messages."""
    message = np.array([communicating_operator(name) for name in events.names], np.bool_)
    # Labels of actions, phases and modules are recorded like operators, but time in them alone is time in none.
    label = np.array([read_label(name) is not None for name in events.names], np.bool_) & ~message
    operators = events.of_kind("cpu_op") & ~events.named(label)
    return operators | (events.named(message) & events.of_kind("annotation"))


def communicating_kernels(profile: Profile) -> NDArray[np.bool_]:
    """Which events are kernels that carry messages."""
    events = profile.events
    result = events.named(np.array([_COMMUNICATING_KERNEL.search(name) is not None for name in events.names], np.bool_))
    result[profile.messages.event] = True
    return result & events.of_kind("kernel")


def communicating_operator(name: str) -> bool:
    """Whether an operator or a range on the host carries a message."""
    found = read_label(name)
    return found.kind == "message" if found else _COMMUNICATING_OPERATOR.match(name) is not None
