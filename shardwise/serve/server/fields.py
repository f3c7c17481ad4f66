"""Reads a request's JSON by hand: each field is read with its type and limits, and unknown fields are refused by name.

A null counts as a missing field, as OpenAI's clients send it. A mistake raises `ApiError` with the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.serve.server.errors import ApiError

_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}


def parse(raw: bytes) -> Any:
    """Parse UTF-8 JSON. Python also accepts values that JSON lacks, and strings that are not valid Unicode; both are refused."""
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in raw:  # half a surrogate pair would fail later, where nobody expects it
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError as e:
        raise ApiError(400, f"the body is not UTF-8: byte {e.start} cannot be decoded", code="invalid_utf8") from None
    except UnicodeEncodeError:
        raise ApiError(400, "a string of the body has half a surrogate pair", code="invalid_utf8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as e:
        raise ApiError(400, f"the body is not JSON: {e}", code="invalid_json") from None
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def kind(value: object) -> str:
    """JSON's name for the type of a value."""
    return "null" if value is None else _KINDS.get(type(value), "a value")


class Fields:
    """The fields of one object. `name` is the object's name in the request, for error messages."""

    def __init__(self, values: object, name: str = "") -> None:
        if not isinstance(values, dict):
            what = f"'{name}'" if name else "the body"
            raise ApiError(400, f"{what} must be an object, not {kind(values)}", name or None, "invalid_type")
        self._values = values
        self._prefix = f"{name}." if name else ""
        self._known: set[str] = set()

    def get(self, name: str) -> Any:
        """Any value; None if it is missing."""
        self._known.add(name)
        return self._values.get(name)

    def wrong(self, name: str, message: str, code: str = "invalid_value") -> ApiError:
        """The error for one field."""
        param = self._prefix + name
        return ApiError(400, f"'{param}' {message}", param, code)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._not(name, "a boolean", value)
        return value

    def text(self, name: str, default: str = "", most: int = 1024) -> str:
        """A string of at most `most` characters."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._not(name, "a string", value)
        if len(value) > most:
            raise self.wrong(name, f"is {len(value)} characters long; at most {most} are taken")
        return value

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """An integer between limits."""
        found = self.maybe_whole(name, least, most)
        return default if found is None else found

    def maybe_whole(self, name: str, least: int, most: int) -> int | None:
        """An integer between limits; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._not(name, "an integer", value)
        if not least <= value <= most:
            raise self.wrong(name, f"must be between {least} and {most}, not {_short(value)}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number between limits."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._not(name, "a number", value)
        if not least <= value <= most:  # also where it is too large for a float
            raise self.wrong(name, f"must be between {least:g} and {most:g}, not {_short(value)}")
        return float(value)

    def one_of(self, name: str, default: str, words: Sequence[str]) -> str:
        """One of several words."""
        value = self.text(name, default)
        if value not in words:
            raise self.wrong(name, f'must be {" or ".join(map(repr, words))}, not "{value[:50]}"')
        return value

    def inner(self, name: str) -> Fields | None:
        """The fields of an object inside this one."""
        value = self.get(name)
        return None if value is None else Fields(value, self._prefix + name)

    def only(self, name: str, allowed: Iterable[object], reason: str) -> None:
        """Refuse an unsupported field, unless its value is one of `allowed`, which ask for nothing."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.wrong(name, reason, "unsupported_value")

    def ignore(self, *names: str) -> None:
        """Accept fields that have no effect here."""
        self._known.update(names)

    def end(self) -> None:
        """Refuse fields that were never read, as OpenAI does."""
        unknown = [name for name in self._values if name not in self._known]
        if unknown:
            param = self._prefix + unknown[0][:100]
            raise ApiError(400, f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")

    def _not(self, name: str, wanted: str, value: object) -> ApiError:
        return self.wrong(name, f"must be {wanted}, not {kind(value)}", "invalid_type")


def _short(value: float) -> str:
    """A number for an error message, however large."""
    return f"{value:g}" if isinstance(value, float) or value.bit_length() < 64 else "a number that is too large"
