"""Events as typed records. A whole batch of text is decoded at once. Only the used fields of an event become objects, and times
stay text until a column is made of them. Invalid JSON is repaired first, an event with fields of wrong types keeps those that fit,
and every problem of the file is collected.

Times are microseconds such as 1712195495519689.047. A float64 resolves such a date to a quarter of a microsecond: kernels would
appear to overlap, and short ones would vanish. So the decimal text is parsed into exact integer nanoseconds.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation
from functools import reduce
from operator import or_
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct, field
from numpy.typing import NDArray

from shardwise.trace.reading.integers import NONE


class Problems:
    """The problems of one file, each kind with its count and first position."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sentences: list[str] = []
        self._counted: dict[str, list[int]] = {}

    def add(self, sentence: str) -> None:
        """Add a problem of the file as a whole."""
        self._sentences.append(f"{self.path}: {sentence}")

    def count(self, what: str, position: int, times: int = 1) -> None:
        """Count a problem of some events; `what` completes "3 events …", as in "have no name"."""
        if times:
            self._counted.setdefault(what, [0, position])[0] += times

    def absorb(self, later: Problems) -> None:
        """Add the problems of a later part of the same file."""
        self._sentences += later._sentences
        for what, (times, first) in later._counted.items():
            self.count(what, first, times)

    def sentences(self) -> tuple[str, ...]:
        """All problems as sentences."""
        counted = (
            f"{self.path}: {count} event{'' if count == 1 else 's'} {what}; the first at or after byte {first} of the text"
            for what, (count, first) in self._counted.items()
        )
        return (*self._sentences, *counted)


_STRING_OR_NO_NUMBER = re.compile(
    rb'"(?:[^"\\]+|\\.)*+(?:"|\\?\Z)|[-+]?\b(?:nan|inf|infinity)\b(?:\(\w*\))?', re.IGNORECASE | re.DOTALL
)
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_BAD_ESCAPE = re.compile(rb'\\(?:[^"\\/bfnrtu]|u(?![0-9a-fA-F]{4}))', re.DOTALL)
_LONE_BYTE = re.compile("[\udc80-\udcff]")


def repair(text: bytes) -> bytes:
    """Replace what profilers write and JSON forbids: `nan` and `inf` of a bandwidth divided by zero, Windows paths with single
    backslashes, names truncated within a UTF-8 character. The length stays the same, and so do byte positions."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        # The next block may complete a character at the end.
        characters, used = codecs.utf_8_decode(text, "surrogateescape", False)
        text = _LONE_BYTE.sub("?", characters).encode("utf-8") + text[used:]
    lower = text.lower()
    if b"nan" in lower or b"inf" in lower or _BAD_ESCAPE.search(text):
        return _STRING_OR_NO_NUMBER.sub(_mend_token, text)
    return text


def _mend_token(found: re.Match[bytes]) -> bytes:
    token = found[0]
    if not token.startswith(b'"'):
        return b'""'.ljust(len(token))
    whole = b"\\" in token and len(token) > 1 and token.endswith(b'"')
    return _ESCAPE.sub(_mend_escape, token) if whole else token


def _mend_escape(found: re.Match[bytes]) -> bytes:
    return found[0] if len(found[0]) > 1 else b"/"


Scalar = int | float | str | bool | None
"""`pid`, `tid` or stream: mostly a number, sometimes a string."""


class Arguments(Struct, gc=False):
    """The used fields of an event's `args`."""

    # In the order of the files, since the decoder searches for each field from the one before.
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
    group: Scalar = field(default=None, name="Process Group Name")
    description: str | None = field(default=None, name="Process Group Description")
    ranks: str | None = field(default=None, name="Process Group Ranks")
    number: int = field(default=NONE, name="Seq")
    source: int = field(default=NONE, name="Src Rank")
    destination: int = field(default=NONE, name="Dst Rank")


class Span(Struct, gc=False, kw_only=True, tag_field="ph", tag="X"):
    """A complete event (`ph` X): something with a duration."""

    cat: str = ""
    name: str
    pid: Scalar = None
    tid: Scalar = None
    ts: Raw
    dur: Raw = Raw()
    args: Arguments | None = None


class MemoryArguments(Struct, gc=False):
    """The fields of an allocation."""

    bytes: int = field(default=0, name="Bytes")
    allocated: int = field(default=NONE, name="Total Allocated")
    reserved: int = field(default=NONE, name="Total Reserved")
    device_type: int = field(default=NONE, name="Device Type")
    device: int = field(default=NONE, name="Device Id")


class Instant(Struct, gc=False, tag_field="ph", tag="i"):
    """An instant event; only allocations, named `[memory]`, are used."""

    name: str = ""
    ts: Raw = Raw()
    args: MemoryArguments | None = None


# Flow events, names of threads, counters, samples and the rest: their fields are skipped.
_SKIPPED = tuple(
    msgspec.defstruct(f"Skipped{number}", [], tag_field="ph", tag=phase, gc=False)
    for number, phase in enumerate(
        ("s", "t", "f", "M", "B", "E", "I", "b", "e", "n", "C", "P", "N", "O", "D", "R", "c", "v", "V")
    )
)

Record = Any
"""A `Span` or `Instant`, or an empty record of a skipped event."""

_union: Any = reduce(or_, _SKIPPED, Span | Instant)

record_list = msgspec.json.Decoder(list[_union])
"""Decodes a list of events."""

raw_list = msgspec.json.Decoder(list[Raw])
"""Splits a list of events without decoding them."""

MALFORMED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What decoders raise on text that is not JSON or has fields of wrong types."""

_one = msgspec.json.Decoder(_union)
_TEXT = (str, int, float)


def read_one(element: bytes) -> tuple[Record | None, str, bool]:
    """One event with the fields that can be read, or None and the reason; and whether it is JSON."""
    try:
        return _one.decode(element), "", True
    except MALFORMED:
        pass
    try:
        value = json.loads(element, strict=False)  # more forgiving than msgspec
    except RecursionError:
        return None, "nests too deep", True
    except ValueError:
        return None, "is not JSON", False
    try:
        return *_converted(element, value), True
    except MALFORMED:
        return None, "is not JSON", True


def _converted(element: bytes, value: Any) -> tuple[Record | None, str]:
    """An event with fields of wrong types: those that fit or can be converted. Else None and the reason."""
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
    category, process, thread = (_scalar(value.get(key)) for key in ("cat", "pid", "tid"))
    category = "" if category is None else str(category)
    arguments = _arguments(value["args"]) if isinstance(value.get("args"), dict) else None
    span = Span(cat=category, name=str(name), pid=process, tid=thread, ts=times.ts, dur=times.dur, args=arguments)
    return span, ""


class _Times(Struct, gc=False):
    """The times of an event as text."""

    ts: Raw = Raw()
    dur: Raw = Raw()


def _arguments(given: dict[str, Any]) -> Arguments:
    """The arguments whose types fit or can be converted."""
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
    """An integer within 64 bits, or `NONE`."""
    try:
        number = int(value) if isinstance(value, _TEXT) and value == value else NONE
    except (ValueError, OverflowError):
        return NONE
    return number if abs(number) < 1 << 63 else NONE


def _scalar(value: Any) -> Scalar:
    return value if isinstance(value, _TEXT) else None


LIMIT = 1 << 62
"""Upper bound of times in nanoseconds, so that the sum or difference of two fits into 64 bits."""

_SCALE = np.array([1000, 100, 10, 1], np.int64)
_LONGEST = 18  # digits that always fit into 64 bits
_LONGEST_ODD = 400
_EXACT = Context(prec=_LONGEST_ODD + 10)


def nanoseconds(texts: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Texts of microseconds as integer nanoseconds, and a mask of those that are times; others are 0. Finer values are rounded to
    the nearest nanosecond, halves to even. Texts may be any buffers, so that none is copied."""
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    joined = b",".join([*texts, b""])
    if joined.translate(None, b"0123456789.-,"):
        return _one_by_one(texts)
    characters = np.frombuffer(joined, np.uint8)
    ends = np.flatnonzero(characters == ord(","))
    if len(ends) != len(texts):
        return _one_by_one(texts)
    dots = np.flatnonzero(characters == ord("."))
    minus = np.flatnonzero(characters == ord("-")) if b"-" in joined else dots[:0]
    each_has_one = len(dots) == len(ends) and (dots < ends).all() and (dots[1:] > ends[:-1]).all()
    owner = np.arange(len(ends)) if each_has_one else np.searchsorted(ends, dots)
    decimals = np.zeros(len(texts), np.int64)
    decimals[owner] = ends[owner] - dots - 1
    digits = np.diff(ends, prepend=-1) - 1
    digits[owner] -= 1
    digits[np.searchsorted(ends, minus)] -= 1
    regular = decimals.max() <= 3 and digits.min() >= 1 and digits.max() <= _LONGEST
    if not regular or (owner[1:] == owner[:-1]).any() or (characters[minus - 1] != ord(",")).any():
        return _one_by_one(texts)
    values = np.fromstring(joined.translate(None, b".")[:-1], np.int64, sep=",")
    scale = _SCALE[decimals]
    known = np.abs(values.astype(np.float64) * scale) < LIMIT
    return np.where(known, values * scale, 0), known


def _one_by_one(texts: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The same for any text: exponents, many digits, quotes, words."""
    values = [_exact(bytes(text)) for text in texts]
    known = np.array([value is not None for value in values], np.bool_)
    return np.array([value or 0 for value in values], np.int64), known


def _exact(text: bytes) -> int | None:
    """One text of microseconds as nanoseconds, None if it is not a number or out of range."""
    if len(text) > _LONGEST_ODD:
        return None
    try:
        micro = Decimal(text.decode("ascii").strip().strip('"'))
        if not micro.is_finite() or micro.adjusted() > _LONGEST:
            return None
        if micro.adjusted() < -_LONGEST:
            return 0
        value = int(micro.scaleb(3, _EXACT).to_integral_value(ROUND_HALF_EVEN, _EXACT))
    except (InvalidOperation, ValueError, OverflowError):
        return None
    return value if abs(value) < LIMIT else None
