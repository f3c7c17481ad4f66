"""The events of a file as typed records. A whole piece of text is decoded at once; only what is wanted of each event becomes an
object, and times stay text until a column of them is made. An event of a wrong form is mended if its sense is clear.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Raw, Struct, field

from shardwise.trace.reading.events import NONE

Scalar = int | float | str | bool | None
"""What stands for a process, a thread or a stream: mostly a number, sometimes a word."""


class Arguments(Struct, gc=False):
    """What is wanted of an event's `args`; everything else is passed over."""

    # In the order in which files have them, since the decoder looks for each field after the one before.
    external: int = field(default=NONE, name="External id")
    sequence: int = field(default=NONE, name="Sequence number")
    forward_thread: int = field(default=NONE, name="Fwd thread id")
    values: Raw = field(default=Raw(), name="Concrete Inputs")
    types: Raw = field(default=Raw(), name="Input type")
    dims: Raw = field(default=Raw(), name="Input Dims")
    device: Scalar = None
    stream: Scalar = None
    correlation: int = NONE
    collective: str | None = field(default=None, name="Collective name")
    elements_in: int = field(default=NONE, name="In msg nelems")
    elements_out: int = field(default=NONE, name="Out msg nelems")
    size: int = field(default=NONE, name="Group size")
    dtype: str | None = None
    splits_in: str | None = field(default=None, name="In split size")
    splits_out: str | None = field(default=None, name="Out split size")
    group: Scalar = field(default=None, name="Process Group Name")
    description: str | None = field(default=None, name="Process Group Description")
    ranks: str | None = field(default=None, name="Process Group Ranks")
    number: int = field(default=NONE, name="Seq")
    source: int = field(default=NONE, name="Src Rank")
    destination: int = field(default=NONE, name="Dst Rank")
    external_before_1_12: int = field(default=NONE, name="external id")


class Span(Struct, gc=False, kw_only=True, tag_field="ph", tag="X"):
    """Something that took time."""

    cat: str = ""
    name: str
    pid: Scalar = None
    tid: Scalar = None
    ts: Raw
    dur: Raw = Raw()
    args: Arguments | None = None


class MemoryArguments(Struct, gc=False):
    """What an allocation says of itself."""

    bytes: int = field(default=0, name="Bytes")
    allocated: int = field(default=NONE, name="Total Allocated")
    reserved: int = field(default=NONE, name="Total Reserved")
    device_type: int = field(default=NONE, name="Device Type")
    device: int = field(default=NONE, name="Device Id")
    address: int = field(default=NONE, name="Addr")


class Instant(Struct, gc=False, tag_field="ph", tag="i"):
    """A moment; only allocations are wanted, whose name is `[memory]`."""

    name: str = ""
    ts: Raw = Raw()
    args: MemoryArguments | None = None


class NameArguments(Struct, gc=False):
    """A name given to a process or thread."""

    name: Scalar = None


class Naming(Struct, gc=False, tag_field="ph", tag="M"):
    """Says what a thread is called."""

    name: str = ""
    pid: Scalar = None
    tid: Scalar = None
    args: NameArguments | None = None


# Arrows, counters, samples and the rest: their fields are skipped, nothing is made of them but a mark.
_PASSED_OVER = tuple(
    msgspec.defstruct(f"PassedOver{number}", [], tag_field="ph", tag=phase, gc=False)
    for number, phase in enumerate(
        ("s", "t", "f", "B", "E", "I", "b", "e", "n", "C", "P", "N", "O", "D", "R", "c", "v", "V")
    )
)

Record = Any
"""A `Span`, `Instant`, `Naming`, or a mark of something passed over."""

_union: Any = Span | Instant | Naming
for _kind in _PASSED_OVER:
    _union = _union | _kind

many = msgspec.json.Decoder(list[_union])
"""Decodes a list of events."""

apart = msgspec.json.Decoder(list[Raw])
"""Takes a list of events apart without looking into them."""

MALFORMED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What decoders raise on text that is not JSON, or not of the wanted types."""

_one = msgspec.json.Decoder(_union)
_TEXT = (str, int, float)


def read_one(element: bytes) -> tuple[Record | None, str, bool]:
    """One event by itself, as far as it makes sense; the reason where it makes none, and whether it is JSON at all."""
    try:
        return _one.decode(element), "", True
    except MALFORMED:
        pass
    try:
        value = json.loads(element, strict=False)  # more forgiving than the quick decoder
    except RecursionError:
        return None, "nests too deep", True
    except ValueError:
        return None, "is not JSON", False
    try:
        return *_made(element, value), True
    except MALFORMED:
        return None, "is not JSON", True


def _made(element: bytes, value: Any) -> tuple[Record | None, str]:
    """An event whose fields are of wrong types, with those that fit or can be made to, or None and the reason."""
    if not isinstance(value, dict):
        return None, "is not an object"
    phase = value.get("ph")
    if phase != "X":
        return (None, "has no phase (ph)") if phase is None else (None, "")
    name, start = value.get("name"), value.get("ts")
    if not isinstance(name, _TEXT):
        return None, "has no name"
    if not isinstance(start, _TEXT) or isinstance(start, bool):
        return None, "has no time (ts)"
    times = msgspec.json.decode(element, type=_Times)
    span = Span(
        cat=_word(value.get("cat")),
        name=str(name),
        pid=_scalar(value.get("pid")),
        tid=_scalar(value.get("tid")),
        ts=times.ts,
        dur=times.dur,
    )
    if isinstance(value.get("args"), dict):
        span.args = _arguments(value["args"])
    return span, ""


class _Times(Struct, gc=False):
    """The times of an event as text."""

    ts: Raw = Raw()
    dur: Raw = Raw()


def _arguments(given: dict[str, Any]) -> Arguments:
    """The arguments that have a fitting type, or one that turns into it."""
    result = Arguments()
    for info in msgspec.structs.fields(Arguments):
        value = given.get(info.encode_name)
        if value is None:
            continue
        if info.type is int:
            setattr(result, info.name, _number(value))
        elif info.type is Raw:
            setattr(result, info.name, Raw(msgspec.json.encode(value)))
        elif info.name in ("stream", "device", "group"):
            setattr(result, info.name, _scalar(value))
        elif isinstance(value, (*_TEXT, list)):
            setattr(result, info.name, str(value))
    return result


def _number(value: Any) -> int:
    """A whole number within 64 bits, or `NONE`."""
    try:
        number = int(value) if isinstance(value, _TEXT) and value == value else NONE
    except (ValueError, OverflowError):
        return NONE
    return number if abs(number) < 1 << 63 else NONE


def _scalar(value: Any) -> Scalar:
    return value if isinstance(value, _TEXT) else None


def _word(value: Any) -> str:
    return str(value) if isinstance(value, _TEXT) else ""
