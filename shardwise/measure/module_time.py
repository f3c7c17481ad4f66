"""Time by module, from a profile just recorded in this process. `shardwise trace` reads the same from the file; this is for
machines without the packages that read traces.

Time is kernel time on a GPU and operator time on a CPU, without communication. An operator belongs to the innermost label around
it, or to the module whose forward pass created its autograd node; without either it is unlabelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from shardwise.labels import read_label

UNLABELLED = "(unlabelled)"
BACKWARD_SCOPE = 1
"""PyTorch's scope of the functions that autograd runs (`RecordScope::BACKWARD_FUNCTION`)."""
COMMUNICATION = ("nccl", "c10d::", "_c10d_functional::", "gloo:", "rccl")

Node = tuple[int, int]
"""An autograd node: the thread of its forward pass, and its sequence number there."""


def module_times(events: Iterable[Any]) -> dict[str, dict[str, float]]:
    """Seconds by module, or phase of a step, and direction."""
    known = [event for event in events if not event.is_async]
    makers = _makers(known)
    found: dict[str, Counter[str]] = {}
    for event in known:
        seconds = _own_seconds(event)
        if seconds:
            owner, backward = _owner(event, makers)
            found.setdefault(owner, Counter())["backward" if backward else "forward"] += seconds  # type: ignore[assignment]
    return {owner: dict(times) for owner, times in found.items()}


def _own_seconds(event: Any) -> float:
    """The self time of an event: its kernels' time if it launched any, otherwise host time."""
    if event.name.startswith(COMMUNICATION) or "CPU" not in str(event.device_type):
        return 0.0
    # A user annotation also appears on the device, over the kernels inside it.
    if event.is_user_annotation or event.name.startswith("ProfilerStep"):
        return 0.0
    if event.use_device:
        return sum(k.duration for k in event.kernels if not k.name.startswith(COMMUNICATION)) / 1e6
    if read_label(event.name) is not None or any(map(_sends, event.cpu_children)):  # the latter waits for its message
        return 0.0
    return max(0.0, event.self_cpu_time_total / 1e6)


def _sends(event: Any) -> bool:
    """Whether this is a collective or send, or the label around one."""
    label = read_label(event.name)
    return event.name.startswith(COMMUNICATION) or (label is not None and label.kind == "message")


def _of_node(event: Any) -> bool:
    """Whether this is an autograd node, or the engine around it."""
    return event.scope == BACKWARD_SCOPE or event.name.startswith("autograd::engine::evaluate_function")


def _label_of(event: Any) -> str | None:
    found = read_label(event.name)
    if found is None or found.kind not in ("module", "phase"):
        return None
    return found.words[0] if found.kind == "module" else f"({found.words[0]})"


def _makers(events: list[Any]) -> dict[Node, str]:
    """The module that created each autograd node. An operator records the sequence number of the next node to be created, so the
    last operator with a given number created that node."""
    forward = [e for e in events if e.sequence_nr >= 0 and not _of_node(e)]
    makers: dict[Node, str] = {}
    for event in sorted(forward, key=lambda e: e.time_range.start):
        at: Any = event
        while at is not None and _label_of(at) is None:
            at = at.cpu_parent
        makers[event.thread, event.sequence_nr] = _label_of(at) or UNLABELLED if at is not None else UNLABELLED
    return makers


def _owner(event: Any, makers: dict[Node, str]) -> tuple[str, bool]:
    """The module of an operator, and whether the backward pass runs it."""
    owner, backward, at = "", False, event
    while at is not None:
        if not owner:
            owner = _label_of(at) or ""
        if _of_node(at):
            backward = True
            owner = owner or makers.get((at.fwd_thread, at.sequence_nr), "")
        at = at.cpu_parent
    return owner or UNLABELLED, backward
