"""Settings that a run takes from its token sets: the rows of the embedding, from their tokenizer, and whether documents are
separate.

Both are in a set's index, which is read here without the rest of `data/`. Errors in a set are reported where it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INDEX = "index.json"
"""The file that describes a token set."""


def vocabulary_of(sets: Iterable[str]) -> int | None:
    """The size of the sets' tokenizer, the largest if they differ; None if no set exists here."""
    found = [size for folder in sets if (size := _size(Path(folder)))]
    return max(found, default=None)


def all_text(sets: Iterable[str]) -> bool:
    """Whether none of these sets holds conversations, whose documents never see each other."""
    return all(_index(Path(folder)).get("kind", "text") == "text" for folder in sets)


def _index(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _size(folder: Path) -> int | None:
    try:
        size = _index(folder)["tokenizer"]["vocab"]
    except (KeyError, TypeError):
        return None
    return size if type(size) is int and 0 < size < 1 << 32 else None
