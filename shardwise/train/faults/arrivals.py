"""Who did not arrive: which collective each rank has last begun in each of its groups, and which of them it still waits for.

PyTorch's flight recorder keeps this for every collective that passes a process group, those of `fully_shard` and
DistributedDataParallel included, on NCCL and on gloo; the group's description is the axis. A rank that waits for number 17 of a
group waits for those of its members that have not begun number 17. What can't be seen there: on gloo, point-to-point messages,
so a pipeline says itself what it waits for; and a group of which a rank has begun nothing within the recorder's memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.parallel.mesh import Mesh
    from shardwise.parallel.pipeline import Pipeline

REMEMBERED = 256
"""Collectives the recorder keeps where nobody has asked for more."""
NAME = 16
"""Letters of a group's name, which is a hash, that are told."""


@dataclass(frozen=True)
class Arrival:
    """Where a rank stands in one of its groups."""

    axis: str
    group: str
    begun: int = 0
    """Number of the last collective it has begun there; 0: none that is remembered."""
    waits_for: int = 0
    """Number of the first one that it has begun and that is not over; 0: none."""
    collective: str = ""
    """That one, or else the last one begun."""
    seconds: float = 0.0
    """Since it began that one."""
    owed_by: int = -1
    """The rank that has to send, for a message of a pipeline."""


def remember_collectives(environment: Mapping[str, str]) -> None:
    """Turn the flight recorder on; must come before the first process group."""
    if "TORCH_FR_BUFFER_SIZE" not in environment and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment:
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(REMEMBERED)


def recorded() -> list[dict[str, Any]]:
    """The recorder's entries, oldest first."""
    from shardwise.torch_private import flight_record

    return json.loads(flight_record()).get("entries", [])


def arrivals(mesh: Mesh, pipeline: Pipeline, now_ns: int) -> list[Arrival]:
    """Where this rank stands in each of its groups."""
    found = {name: Arrival(axis, name[:NAME]) for name, axis in mesh.axes_by_group().items()}
    for entry in recorded():
        name, _ = entry["process_group"]
        # On NCCL messages have numbers of their own, which two ranks cannot compare; pipelines tell theirs below.
        if name not in found or entry["is_p2p"]:
            continue
        before, number = found[name], entry["collective_seq_id"]
        over = entry["retired"] or entry["state"] == "completed"
        if before.waits_for:  # an earlier one is not over yet, and that is the one to tell
            found[name] = replace(before, begun=number)
            continue
        collective = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        seconds = round((now_ns - entry["time_created_ns"]) / 1e9, 3)
        found[name] = Arrival(before.axis, before.group, number, 0 if over else number, collective, seconds)
    result = list(found.values())
    waiting = pipeline.waiting
    if waiting is not None:
        message, sender = waiting
        what = f"{message.kind} of stage {message.stage}, microbatch {message.microbatch}"
        result.append(Arrival("pipeline", "message", waits_for=1, collective=what, owed_by=sender))
    return result


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    rank: int
    process: int = 0
    count: int = 0
    step: int = 0
    phase: str = "start"
    idle: float = 0.0
    """Seconds since it last got anything done."""
    arrivals: list[Arrival] = field(default_factory=list)
    """Where it stands in each of its groups."""


def missing(beats: Sequence[Beat], silent: Sequence[int]) -> list[tuple[int, Arrival]]:
    """The ranks that others wait for while they themselves wait for nobody, or are silent; each with what it is missed in."""
    heard = {beat.rank: beat for beat in beats if beat.rank not in silent}
    waiting = {rank for rank, beat in heard.items() if any(a.waits_for for a in beat.arrivals)}
    absent: dict[int, Arrival] = {}
    for rank in sorted(waiting):
        for wait in heard[rank].arrivals:
            if not wait.waits_for:
                continue
            if wait.owed_by >= 0:
                absent.setdefault(wait.owed_by, wait)
            for beat in beats:
                if any(a.group == wait.group and a.begun < wait.waits_for for a in beat.arrivals):
                    absent.setdefault(beat.rank, wait)
    culprits = [rank for rank in absent if rank not in waiting]
    return [(rank, absent[rank]) for rank in sorted(culprits or absent)]


def explain(beats: Sequence[Beat], silent: Sequence[int]) -> str:
    """A sentence that names the ranks which did not arrive, and where."""
    found = missing(beats, silent)
    parts = [
        f"rank {rank} did not arrive at {wait.collective} number {wait.waits_for} of axis {wait.axis}, "
        f"which others have waited for since {wait.seconds:.0f} s"
        if wait.owed_by < 0
        else f"rank {rank} did not send the {wait.collective}, along axis {wait.axis}"
        for rank, wait in found
    ]
    named = {rank for rank, _ in found}
    parts += [f"rank {rank} gives no sign of life" for rank in sorted(set(silent)) if rank not in named]
    if not parts:
        doing = ", ".join(f"rank {b.rank} in {b.phase} of step {b.step}" for b in beats if b.idle > 0)
        parts = [f"no rank waits for another in a collective that is recorded ({doing})"]
    return "; ".join(parts)
