"""The rows of the embedding where a run does not set them: those of the tokenizer that its token sets were made with.

A set's index says them, and is read here without the rest of `data/`. What is wrong with a set is said where it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

INDEX = "index.json"
"""The file of a token set that describes it."""


def vocabulary_of(sets: Iterable[str]) -> int | None:
    """The size of the tokenizer of these sets, the largest where they differ; None where no set is here to say it."""
    found = [size for folder in sets if (size := _size(Path(folder)))]
    return max(found, default=None)


def _size(folder: Path) -> int | None:
    try:
        size = json.loads((folder / INDEX).read_bytes())["tokenizer"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return size if type(size) is int and 0 < size < 1 << 32 else None
