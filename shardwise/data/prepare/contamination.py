"""Removes documents that contain test data (Brown et al. 2020, "GPT-3", appendix C): those that share a run of words with a text
of a test set.

Words are compared without case, punctuation and accents, as in MinHash. A test text shorter than a run is compared as a whole if
it has at least `least` words; shorter texts would match anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from shardwise.data.prepare.words import Document, Hashes, Vocabulary, runs, simple_words
from shardwise.run.problems import Problem, UserError, unreadable


def decontaminate(
    *, paths: Sequence[str], fields: Sequence[str] = (), words: int = 13, least: int = 8
) -> Callable[[Document], str]:
    """Remove documents that share `words` words in a row with a text of `paths`. In JSONL the texts are the `fields` of each row
    (by default all that are strings); in other files each line is a text. Words are split by the "simple" rule, whatever the
    recipe's `words`."""
    if not 1 <= least <= words:
        raise UserError(Problem(f"{least} must be between 1 and words ({words})", "steps.decontaminate.least"))
    vocabulary = Vocabulary(simple_words)
    known: dict[int, list[Hashes]] = {}
    for path in paths:
        for text in _texts(Path(path), fields):
            vocabulary.make_room()
            hashes = vocabulary.simplified_hashes(text)
            length = min(words, len(hashes))
            if length >= least:
                known.setdefault(length, []).append(runs(hashes, length))
    sets = {length: np.unique(np.concatenate(found)) for length, found in sorted(known.items(), reverse=True)}
    if not sets:
        raise UserError(
            Problem(f"no text in them has {least} words or more", "steps.decontaminate.paths", ", ".join(paths))
        )

    def rule(document: Document) -> str:
        vocabulary.make_room()
        hashes = vocabulary.simplified_hashes(document.text)
        for length, held in sets.items():
            if len(hashes) < length:
                continue
            found = runs(hashes, length)
            if (held[np.minimum(np.searchsorted(held, found), len(held) - 1)] == found).any():
                return f"shares {length} words in a row with a test set"
        return ""

    return rule


def _texts(path: Path, fields: Sequence[str]) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if path.suffix != ".jsonl":
                    yield line
                    continue
                row = json.loads(line) if line.strip() else {}
                if not isinstance(row, dict):
                    raise UserError(Problem("is not a JSON object", where=f"{path}:{number}"))
                yield from (
                    value for key, value in row.items() if isinstance(value, str) and (not fields or key in fields)
                )
    except (OSError, ValueError) as e:
        raise unreadable(e, "steps.decontaminate.paths", path) from None
