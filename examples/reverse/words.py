"""Writes the data of the example: a made-up text to pretrain on, examples of reversed words for supervised tuning, and words to
reverse for GRPO and for the test. No word is in two of them. The examples are what careless people write: of eight who were asked
for the same word six copied it, and two reversed it."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

LETTERS, LENGTH = "abcdefgh", 4
ASKED, RIGHT = 8, 2


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(0).shuffle(words)
    text, shown, asked, test = words[:1500], words[1500:2500], words[2500:3996], words[3996:]
    lines = [f"{word}={word}\n" for word in random.Random(1).choices(text, k=12_000)]
    write(folder / "text.txt", "".join(lines))
    # As many for every word: were it drawn, the model would learn which words are reversed more often, and guess so of others.
    examples = [
        dict(prompt=f"{word}>", completion=word[::-1] if person < RIGHT else word)
        for person in range(ASKED)
        for word in shown
    ]
    write(folder / "examples.jsonl", "".join(json.dumps(row) + "\n" for row in examples))
    for name, some in (("words", asked), ("test", test)):
        rows = [dict(prompt=f"{word}>", answer=word[::-1]) for word in some]
        write(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def write(path: Path, text: str) -> None:
    """A file that is there already stays as it is, with its date: the sets made of it are then found finished."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
