"""How a config key is declared: its type, default, limits and meaning, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints


def key(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare a config key: its default, what it is for, and the smallest/largest value that makes sense."""
    return field(default=default, metadata={"meaning": meaning, "least": least, "above": above, "most": most})


@dataclass(frozen=True)
class Key:
    """One declared key, as the schema lists it and the reader checks it."""

    name: str
    type: Any
    default: Any
    meaning: str
    least: float | None
    above: float | None
    most: float | None


@cache
def declared(section: type) -> tuple[Key, ...]:
    """The keys of a section in the order they are declared."""
    hints = get_type_hints(section)
    return tuple(Key(f.name, hints[f.name], f.default, **f.metadata) for f in fields(section) if f.metadata)
