"""Reads snapshots of the CUDA allocator: the pickles of `torch.cuda.memory._dump_snapshot`, of any program, and what `shardwise
profile` writes beside its traces.

A pickle can run any program when it is read. These hold nothing but dicts, lists, texts and numbers, so that is all that is let in.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from shardwise.run.problems import Problem, UserError

SUFFIXES = (".pickle", ".pkl")
MOST_FRAMES = 24
"""Frames of an allocation that are looked at, innermost first."""


class Event(NamedTuple):
    """One entry of the allocator's history."""

    action: str
    address: int
    size: int
    time: int
    """In microseconds."""
    frames: tuple[Any, ...] = ()
    """Where it was called, innermost first: dicts of file, line and function."""


class Block(NamedTuple):
    """Memory that is in use when the snapshot is taken."""

    address: int
    size: int
    frames: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """The history of one device, and its end."""

    path: str
    device: int
    events: tuple[Event, ...]
    blocks: tuple[Block, ...]
    reserved: int
    """Bytes of all segments at the end."""
    owners: Mapping[int, str] = field(default_factory=dict)
    """By address, of tensors whose owner is known at the end."""
    marks: Sequence[tuple[int, str, str]] = ()
    """What ran from when on, where the program said so: time, pass, and module."""
    rank: int = 0


class _Plain(pickle.Unpickler):
    """Dicts, lists, tuples, texts and numbers; a pickle that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("refers to something outside of it")


def is_snapshot(path: Path) -> bool:
    """Whether this is a pickle, by its name or its first byte."""
    if not path.is_file():
        return False
    if path.suffix in SUFFIXES:
        return True
    with path.open("rb") as file:
        return file.read(1) == b"\x80"


def read_snapshots(path: Path) -> list[Snapshot]:
    """The devices of a snapshot that have a history or hold memory."""
    try:
        found = _Plain(io.BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError, MemoryError,
            OverflowError, RecursionError) as e:  # fmt: skip
        reason = f"is not a snapshot of PyTorch's allocator, which has only dicts, lists, texts and numbers: it {e}"
        raise UserError(Problem(reason, where=str(path))) from None
    if not isinstance(found, dict) or not {"segments", "device_traces"} <= found.keys():
        reason = "is not a snapshot of PyTorch's allocator: torch.cuda.memory._dump_snapshot writes one"
        raise UserError(Problem(reason, where=str(path)))
    try:
        return _devices(str(path), found)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(Problem(f"is a snapshot whose parts cannot be read: {e!r}", where=str(path))) from None


def _devices(path: str, found: dict[str, Any]) -> list[Snapshot]:
    snapshots = []
    for device, trace in enumerate(found["device_traces"]):
        segments = [segment for segment in found["segments"] if segment.get("device", 0) == device]
        if not trace and not segments:
            continue
        events = tuple(
            Event(str(e["action"]), int(e.get("addr", 0)), int(e["size"]), int(e.get("time_us", at)), _frames(e))
            for at, e in enumerate(trace)
        )
        blocks = tuple(block for segment in segments for block in _active(int(segment["address"]), segment["blocks"]))
        reserved = sum(int(segment["total_size"]) for segment in segments)
        snapshots.append(Snapshot(path, device, events, blocks, reserved))
    return snapshots


def _active(address: int, blocks: Iterable[dict[str, Any]]) -> Iterator[Block]:
    """The blocks in use of a segment that begins at this address."""
    for block in blocks:
        address = int(block.get("address", address))
        if str(block["state"]).startswith("active"):
            yield Block(address, int(block["size"]), _frames(block))
        address += int(block["size"])


def _frames(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get("frames") or ())[:MOST_FRAMES]


def read_profiled(path: Path, rank: int) -> Snapshot | None:
    """The history that `shardwise profile` recorded of a rank; None where it has none, as on CPUs."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)["allocator"]
        if not found:
            return None
        events = tuple(Event(str(e[0]), int(e[1]), int(e[2]), int(e[3])) for e in found["history"])
        blocks: list[Block] = []
        for segment in found["segments"]:
            listed = ({"size": size, "state": state} for size, state in segment["blocks"])
            blocks += _active(int(segment["address"]), listed)
        owners = {int(address): str(owner) for address, owner in found.get("owners", ())}
        marks = tuple((int(when), str(which), str(module)) for when, which, module in found.get("marks", ()))
        reserved = sum(int(segment["bytes"]) for segment in found["segments"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as e:
        raise UserError(Problem(f"is not the memory of a profiled rank: {e!r}", where=str(path))) from None
    return Snapshot(str(path), 0, events, tuple(blocks), reserved, owners, marks, rank)
