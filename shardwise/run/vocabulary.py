"""What a run leaves to its token sets: the rows of the embedding, which are those of their tokenizer, and whether documents are
separate.

A set's index says them, and is read here without the rest of `data/`. What is wrong with a set is said where it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INDEX = "index.json"
"""The file of a token set that describes it."""


def vocabulary_of(sets: Iterable[str]) -> int | None:
    """The size of the tokenizer of these sets, the largest where they differ; None where no set is here to say it."""
    found = [size for folder in sets if (size := _size(Path(folder)))]
    return max(found, default=None)


def all_text(sets: Iterable[str]) -> bool:
    """Whether none of these sets is made of conversations, whose documents never see each other."""
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
